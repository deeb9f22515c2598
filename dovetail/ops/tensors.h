// The tensors inside a value of any structure: tensors, optionals, pairs, tuples, vectors, arrays,
// maps, variants, smart pointers, nested to any depth. A struct of the user's own takes part by a
// function found by argument-dependent lookup,
//   template <class F> void visit_members(MyOutput& o, F&& f) { f(o.logits); f(o.states); }
// Values of other types hold no tensors as far as Dovetail can see.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace dovetail::ops {

template <class T>
void collect_tensors(T& value, std::vector<at::Tensor*>& out);

namespace detail {

template <class T, template <class...> class C>
inline constexpr bool is_a = false;
template <template <class...> class C, class... A>
inline constexpr bool is_a<C<A...>, C> = true;
template <class T>
inline constexpr bool is_array = false;
template <class T, size_t N>
inline constexpr bool is_array<std::array<T, N>> = true;

struct AnyVisitor {
  template <class T>
  void operator()(T&) const {}
};
template <class T>
concept has_members = requires(T& t, AnyVisitor f) { visit_members(t, f); };

}  // namespace detail

// Appends pointers to all defined tensors in `value`, in order of their places.
template <class T>
void collect_tensors(T& value, std::vector<at::Tensor*>& out) {
  if constexpr (std::is_const_v<T>) {
    return;  // cannot be replaced, so is left as it is
  } else if constexpr (std::is_base_of_v<at::Tensor, T>) {
    if (value.defined()) out.push_back(&value);
  } else if constexpr (detail::has_members<T>) {
    visit_members(value, [&](auto& member) { collect_tensors(member, out); });
  } else if constexpr (detail::is_a<T, std::optional> || detail::is_a<T, std::shared_ptr> ||
                       detail::is_a<T, std::unique_ptr>) {
    if constexpr (!std::is_abstract_v<std::remove_reference_t<decltype(*value)>>)
      if (value) collect_tensors(*value, out);
  } else if constexpr (detail::is_a<T, std::pair> || detail::is_a<T, std::tuple>) {
    std::apply([&](auto&... member) { (collect_tensors(member, out), ...); }, value);
  } else if constexpr (detail::is_a<T, std::vector> || detail::is_array<T>) {
    if constexpr (!std::is_same_v<T, std::vector<bool>>)
      for (auto& member : value) collect_tensors(member, out);
  } else if constexpr (detail::is_a<T, std::map> || detail::is_a<T, std::unordered_map>) {
    for (auto& [key, member] : value) collect_tensors(member, out);
  } else if constexpr (detail::is_a<T, std::variant>) {
    std::visit([&](auto& member) { collect_tensors(member, out); }, value);
  }
}

}  // namespace dovetail::ops

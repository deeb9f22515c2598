#include "dovetail/layout/tensor_spec.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/ranges.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr std::array<std::pair<ParamKind, std::string_view>, 5> kKinds{{{ParamKind::matrix, "matrix"},
                                                                        {ParamKind::embedding, "embedding"},
                                                                        {ParamKind::vector, "vector"},
                                                                        {ParamKind::conv, "conv"},
                                                                        {ParamKind::expert, "expert"}}};

}  // namespace

std::string_view name_of(ParamKind kind) {
  for (auto [k, name] : kKinds)
    if (k == kind) return name;
  return "?";
}

ParamKind parse_param_kind(std::string_view text) {
  for (auto [k, name] : kKinds)
    if (name == text) return k;
  raise<ConfigError>("parameter kind: wanted matrix, embedding, vector, conv or expert; got \"{}\"", text);
}

int64_t TensorSpec::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

int64_t TensorSpec::row() const {
  if (shape.size() < 2 || kind == ParamKind::vector) return 1;
  if (kind == ParamKind::expert || kind == ParamKind::embedding)
    return std::max<int64_t>(1, shape.back());
  int64_t n = 1;
  for (size_t d = 1; d < shape.size(); ++d) n *= shape[d];
  return std::max<int64_t>(1, n);
}

void validate_nodes(const TensorSpec& t, const TensorNodes& n) {
  if (n.name.empty()) raise<ConfigError>("{}: a kind of nodes has no name", t.name);
  const int dims = t.kind == ParamKind::expert ? 1 : 2;  // a fused expert weight has no columns of its own
  if (n.dim < 0 || n.dim >= dims || n.dim >= std::ssize(t.shape))
    raise<ConfigError>("{}: wanted nodes \"{}\" along dimension 0{} of [{}], got dimension {}", t.name, n.name,
                       dims == 2 ? " or 1" : "", fmt::join(t.shape, ", "), n.dim);
  if (n.edges.size() < 2 || n.edges.front() != 0 || n.edges.back() != t.shape[n.dim] ||
      !std::is_sorted(n.edges.begin(), n.edges.end()))
    raise<ConfigError>("{}: wanted edges of nodes \"{}\" ascending from 0 to {}, got [{}]", t.name, n.name,
                       t.shape[n.dim], fmt::join(n.edges, ", "));
}

ParamKind kind_of_shape(const std::vector<int64_t>& shape) {
  return shape.size() < 2 ? ParamKind::vector : shape.size() == 2 ? ParamKind::matrix : ParamKind::conv;
}

}  // namespace dovetail

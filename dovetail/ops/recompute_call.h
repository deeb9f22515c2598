// Recomputation of a call whose arguments and result are values of any structure (ops/tensors.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/ops/recompute.h"
#include "dovetail/ops/tensors.h"

namespace dovetail::ops {

// call(inputs), saving no activations; `inputs` is a tuple of copyable arguments that own their
// tensors: what they hold behind shared pointers would change under its owner, so that throws
// StateError.
template <class Call, class Inputs>
auto recompute_call(const Call& call, Inputs& inputs, bool trains) -> decltype(call(inputs)) {
  if constexpr (!std::is_copy_constructible_v<Inputs>) {
    raise<StateError>(
        "recompute: arguments that cannot be copied cannot be kept for the second run");
  } else {
    using Output = decltype(call(inputs));
    struct Kept {
      Inputs arguments;  // tensors replaced by empty ones: the node holds them itself
      bool first = true;
      std::optional<Output> result;
    };
    auto kept = std::make_shared<Kept>(Kept{inputs, true, std::nullopt});
    std::vector<at::Tensor*> given, places;
    collect_tensors(inputs, given);
    collect_tensors(kept->arguments, places);
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i] == places[i])
        raise<StateError>("recompute: an argument holds tensors behind a shared pointer");
      values.push_back(*given[i]);
    }
    for (at::Tensor* place : places) *place = at::empty({0});

    const auto function = [kept, call](const std::vector<at::Tensor>& tensors) {
      Inputs arguments = kept->arguments;
      std::vector<at::Tensor*> holes;
      collect_tensors(arguments, holes);
      for (size_t i = 0; i < holes.size(); ++i) *holes[i] = tensors[i];
      Output output = call(arguments);
      std::vector<at::Tensor*> found;
      collect_tensors(output, found);
      std::vector<at::Tensor> results;
      for (const at::Tensor* tensor : found) results.push_back(*tensor);
      if (std::exchange(kept->first, false)) kept->result = std::move(output);
      return results;
    };
    const std::vector<at::Tensor> results = recompute(function, values, trains);
    Output output = std::move(*kept->result);
    kept->result.reset();
    std::vector<at::Tensor*> found;
    collect_tensors(output, found);
    for (size_t i = 0; i < found.size(); ++i) *found[i] = results[i];
    return output;
  }
}

}  // namespace dovetail::ops

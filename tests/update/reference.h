// One parameter held whole or in fragments, and comparisons with torch.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dovetail/update/op.h"

namespace dovetail {

std::vector<float> random_values(int64_t n, uint64_t seed, float scale);

struct Parameter {
  Parameter(TensorSpec spec, uint64_t seed);

  // Runs the operation on the whole, or fragment by fragment; creates missing state. Each
  // fragment's fields are copied to memory of their own, as an engine would hold them.
  void run(const UpdateOp& op, const StepContext& context, const std::vector<int64_t>& cuts = {});

  TensorSpec spec;
  std::vector<float> weight, grad;
  std::map<std::string, std::vector<float>> state;
};

at::Tensor to_torch(const std::vector<float>& values);  // a copy, one-dimensional

// Norm of the difference over the norm of the reference, in double.
double relative_difference(const std::vector<float>& values, const at::Tensor& reference);

// Five steps of several sizes, whole and in random fragments (odd ones, empty ones, single
// elements).
void expect_same_bits_for_any_split(const UpdateOp& op);

}  // namespace dovetail

// Random initial values as a pure function of (seed, parameter name, element index): the same on
// every rank, for every order of parameters, for every number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace dovetail::models {

// Fills `t` (fp32 or bf16, any strides) with draws from a normal distribution of mean 0. Elements
// are counted in logical (row-major) order; fp32 values are rounded to the dtype. Philox
// (base/philox.h) and Box-Muller.
void fill_normal(const at::Tensor& t, double deviation, uint64_t seed, std::string_view name);

}  // namespace dovetail::models

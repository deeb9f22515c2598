// One parameter held whole or in parts, as an engine would hand it to operations, and comparisons
// with torch.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dovetail/update/op.h"

namespace dovetail {

std::vector<float> random_values(int64_t n, uint64_t seed, float scale);

// A state field of a whole parameter; per unit: those of all units in their order.
struct StateValues {
  StateField field;
  std::vector<std::byte> bytes;

  // Throw InvariantError when the field has another dtype.
  std::span<float> f32();
  std::span<const float> f32() const;
  std::span<const uint8_t> u8() const;
  float& operator[](size_t i) { return f32()[i]; }
  operator std::span<const float>() const { return f32(); }
};

struct Parameter {
  Parameter(TensorSpec spec, uint64_t seed);

  // Runs the operation on the whole parameter; creates missing state. Each call's fields are copied
  // to memory of their own, and written fields back from there. Expects that a call changes nothing
  // but the elements of its unit in the fields it writes. Fields that the operation does not read,
  // and workspaces, come filled with NaNs.
  //
  // Elements, blocks and rows: one call for each run between two neighbouring cuts, ascending
  // elements at multiples of uncut_elements(). Assembled units: one call each, cuts are ignored;
  // fields that travel as bf16 are rounded before and after, as the engine does it.
  void run(const UpdateOp& op, const StepContext& context, const std::vector<int64_t>& cuts = {});

  TensorSpec spec;
  std::vector<float> weight, grad;
  std::map<std::string, StateValues, std::less<>> state;
  bool strided = false;  // assembled units come with the tensor's row stride, not packed

 private:
  struct Whole {
    DType dtype;
    const StateField* state;  // null for weight and grad
    std::byte* data;
  };
  Whole whole(std::string_view name);
  void call(const UpdateOp& op, const StepContext& context, const UnitPlace& place, int64_t unit);
};

// Copies, one-dimensional.
at::Tensor to_torch(std::span<const float> values);

// Norm of the difference over the norm of the reference, in double.
double relative_difference(std::span<const float> values, const at::Tensor& reference);

// Weight and all state, to the last bit.
void expect_same_bits(const Parameter& a, const Parameter& b, const std::string& what);

// Options that `make`(beta1, beta2, eps) has to refuse, and the extremes that it takes.
void expect_bad_adam_options_are_refused(
    const std::function<void(double beta1, double beta2, double eps)>& make);

// Five steps of several shapes, whole and in random runs (odd ones, empty ones, single elements or
// blocks); assembled units packed and strided.
void expect_same_bits_for_any_split(const UpdateOp& op);

}  // namespace dovetail

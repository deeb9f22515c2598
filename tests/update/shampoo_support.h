// A parameter held whole, and Shampoo by its formulas in fp64.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "dovetail/update/op.h"
#include "dovetail/update/shampoo.h"

namespace dovetail {

using Values = std::vector<float>;

Values normal_values(int64_t n, uint64_t seed, float scale = 1);
at::Tensor in_double(const Values& values, at::IntArrayRef shape);  // a copy
double difference(const at::Tensor& got, const at::Tensor& wanted);  // of norms, relative
bool same_bits(const Values& a, const Values& b);

// How the fields of an assembled unit are given to an operation: in place, with the tensor's row
// stride; packed; or packed where nothing is aligned.
enum class Memory : uint8_t { in_place, packed, shifted };

// All fields of one parameter, as a rank that holds it whole.
struct Held {
  // Weights are normal values of the seed; state has its initial values.
  Held(TensorSpec spec, UpdateOps ops, uint64_t seed);

  // Runs all operations. Checks that a unit's call touches nothing but its own elements and uses no
  // more workspace than it asked for.
  void step(const StepContext& context, const Values& grad, Memory memory = Memory::in_place);

  Values& weight() { return fields.at("weight"); }
  Values& direction() { return fields.at("grad"); }  // after a step
  Values& of_unit(const std::string& name, int64_t unit) {
    return units.at(name).at(static_cast<size_t>(unit));
  }
  at::Tensor tensor(const std::string& field) const;  // a copy, of the spec's shape in fp64

  TensorSpec spec;
  UpdateOps ops;
  std::map<std::string, Values> fields;              // per element
  std::map<std::string, std::vector<Values>> units;  // state per unit

 private:
  void run_unit(const UpdateOp& op, const UnitPlace& place, int64_t unit,
                const StepContext& context, Memory memory);
};

// The formulas of shampoo.h with dense matrices, for one matrix or (of one row) vector.
struct DenseShampoo {
  // Returns the direction, for g times grad_scale.
  at::Tensor direction(const at::Tensor& g, int64_t step);
  // Takes a step of the weight, decay and momentum included; returns the direction.
  at::Tensor step(at::Tensor& weight, const at::Tensor& g, int64_t step, double lr, double decay);
  at::Tensor root(const at::Tensor& a) const;

  ShampooOptions options;
  bool vector = false;
  double mass = 0;
  at::Tensor left = {}, right = {}, left_root = {}, right_root = {}, square = {}, momentum = {};
};

}  // namespace dovetail

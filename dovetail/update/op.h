// Update operations: what an optimizer is made of.
//
// An optimizer is a list of operations that run in order on every parameter they apply to. An operation declares, per
// parameter, the smallest unit that it needs complete, the fields it reads and writes, and the
// state it keeps. It is then
// called once per unit (or, for element units, once per fragment held) with those fields; it knows
// no ranks. The engine
// runs it where the unit is whole and moves exactly the declared fields where it is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/base/interval.h"
#include "dovetail/layout/tensor_spec.h"

namespace dovetail {

// The smallest thing that an operation needs complete.
enum class UnitKind : uint8_t {
  element,  // any run of elements
  block,    // runs of `block` elements of the global tensor, aligned to its start
  row,      // TensorSpec::row() elements
  matrix,   // the whole tensor
  node,     // a named kind of node of the data tree: "head", "expert"
};

struct Unit {
  UnitKind kind = UnitKind::element;
  int64_t block = 1;        // for UnitKind::block
  std::string node;         // for UnitKind::node
  bool operator==(const Unit&) const = default;
};

// Fields every parameter has; an operation's own state has the names of its schema.
inline constexpr std::string_view kWeight = "weight";  // main weight
inline constexpr std::string_view kGrad = "grad";      // gradient as summed, before StepContext::grad_scale

enum class Access : uint8_t { read, write, read_write };

struct FieldUse {
  std::string name;
  Access access = Access::read;
  bool operator==(const FieldUse&) const = default;
};

// One state field: one value per element of the parameter, created with every element equal to `initial`.
struct StateField {
  std::string name;
  DType dtype = DType::f32;
  float initial = 0;
  bool operator==(const StateField&) const = default;
};

// A field's values for the elements of a fragment. Memory belongs to the engine and outlives the call only.
struct Field {
  std::string_view name;
  DType dtype;
  std::byte* data;  // elements.size() values

  float* f32() const { return reinterpret_cast<float*>(data); }
};

// Part of one parameter, complete in the sense of the declared unit.
struct Fragment {
  const TensorSpec* tensor;      // the global tensor
  int64_t index;                 // the parameter's number in the plan: equal on all ranks, keys random bits
  Interval elements;             // which elements of the global tensor (row-major) the fields hold
  std::span<const Field> fields;  // in the order of uses()

  const Field& field(std::string_view name) const;  // throws InvariantError when the operation did not declare it
  std::span<float> f32(std::string_view name) const;  // the same; throws as well when the field has another dtype
};

// Scalars of one optimizer step, equal on all ranks.
struct StepContext {
  int64_t step = 1;        // 1 for the first step
  float lr = 0;            // after the schedule, before per-parameter factors
  float grad_scale = 1;    // multiply gradients by this: 1/weight of the loss times the clip coefficient
  uint64_t seed = 0;       // for random bits
};

// Immutable after construction; called by one thread at a time.
class UpdateOp {
 public:
  virtual ~UpdateOp() = default;
  virtual std::string_view name() const = 0;
  virtual bool applies_to(const TensorSpec& tensor) const = 0;
  virtual Unit unit(const TensorSpec& tensor) const = 0;
  virtual std::vector<FieldUse> uses(const TensorSpec& tensor) const = 0;
  // State is a function of the global tensor alone and is created explicitly, never by a step.
  virtual std::vector<StateField> state(const TensorSpec& tensor) const = 0;
  // Work for one unit of `elements` elements, in floating-point operations; balances owners. Equal on all ranks.
  virtual double cost(const TensorSpec& tensor, int64_t elements) const = 0;
  virtual void run(const Fragment& fragment, const StepContext& context) const = 0;
  // Name and every hyperparameter in one line: hashed with the plan and stored in checkpoints.
  virtual std::string describe() const = 0;
};

using UpdateOps = std::vector<std::shared_ptr<const UpdateOp>>;

}  // namespace dovetail

// Update operations: what an optimizer is made of.
//
// An optimizer is a list of operations that run in order on every parameter they apply to. An operation declares, per
// parameter, the smallest unit that it needs complete, the fields it reads and writes and the state it keeps. It is
// then called with those fields, for each unit, or for as long a run of elements, blocks or rows as a rank holds; it
// knows no ranks. The engine runs it at the unit's owner and moves exactly the declared fields there and back.
//
// What a call computes for an element may depend on its unit's fields and on nothing else: not on how many units come
// in one call, where they lie, or which rank calls. Then no choice of ranks or degrees changes a bit.
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
#include "dovetail/layout/unit.h"

namespace dovetail {

// Fields every parameter has; an operation's own state has the names of its schema.
inline constexpr std::string_view kWeight = "weight";  // main weight
// The gradient as summed, before StepContext::grad_scale. An operation may overwrite it: those after it see what it
// wrote (a direction), and the step ends with its memory given up. This is the scratch of a multi-operation optimizer.
inline constexpr std::string_view kGrad = "grad";

enum class Access : uint8_t { read, write, read_write };

struct FieldUse {
  std::string name;
  Access access = Access::read;
  // Fragments of units that are cut travel as bf16. Units that are whole are rounded the same way before and after the
  // call, so that cutting never shows. For fp32 fields that the operation writes.
  bool travels_as_bf16 = false;
  bool operator==(const FieldUse&) const = default;

  bool reads() const { return access != Access::write; }
  bool writes() const { return access != Access::read; }
};

// One state field, created with every value equal to `initial`.
struct StateField {
  enum class Per : uint8_t {
    element,  // one value per element of the parameter
    block,    // one per `block` elements of the global tensor, counted from its start; blocks are never cut
    unit,     // unit_values[i] values for unit number i of the operation; held by the rank that runs the unit
  };

  std::string name;
  DType dtype = DType::f32;
  float initial = 0;
  Per per = Per::element;
  int64_t block = 1;
  std::vector<int64_t> unit_values = {};
  bool operator==(const StateField&) const = default;

  int64_t values(const TensorSpec& tensor) const;        // of the whole tensor
  Interval values_in(Interval elements) const;           // per element or block: of a run of elements
};

// A field's values for the elements of a call. Memory belongs to the engine and outlives the call only. Fields per
// element have the call's row stride; all others are packed.
struct Field {
  std::string_view name;
  DType dtype;
  std::byte* data;
  int64_t size;  // values from the first to past the last

  float* f32() const { return reinterpret_cast<float*>(data); }
};

// Scratch of a call: `bytes` bytes of 64-byte aligned memory with undefined content.
using WorkspaceSpan = std::span<std::byte>;

// What one call works on: a run of elements, blocks or rows (1 x n), or one assembled unit.
struct UnitView {
  const TensorSpec* tensor;       // the global tensor
  int64_t index;                  // the parameter's number in the plan: equal on all ranks, keys random bits
  UnitPlace place;                // which elements of the global tensor; a run is 1 x n
  int64_t unit;                   // number of an assembled unit within the tensor; -1 for a run
  int64_t row_stride;             // elements between rows in the memory of the fields
  std::span<const Field> fields;  // those of uses() in their order, then the operation's state per unit
  WorkspaceSpan workspace;        // workspace_bytes() bytes

  const Field& field(std::string_view name) const;    // throws InvariantError when the operation did not declare it
  std::span<float> f32(std::string_view name) const;  // the same; throws as well when the field has another dtype
  std::span<uint8_t> u8(std::string_view name) const;
  // A run's elements of the global tensor.
  Interval elements() const { return {place.first, place.first + place.columns}; }
};

// Scalars of one optimizer step, equal on all ranks.
struct StepContext {
  int64_t step = 1;        // 1 for the first step
  float lr = 0;            // after the schedule, before per-parameter factors
  float grad_scale = 1;    // multiply gradients by this: 1/weight of the loss times the clip coefficient
  uint64_t seed = 0;       // for random bits
};

// Immutable after construction; called by one thread at a time per rank.
class UpdateOp {
 public:
  virtual ~UpdateOp() = default;
  virtual std::string_view name() const = 0;
  virtual bool applies_to(const TensorSpec& tensor) const = 0;
  virtual Unit unit(const TensorSpec& tensor) const = 0;
  virtual std::vector<FieldUse> uses(const TensorSpec& tensor) const = 0;
  // State is a function of the global tensor alone and is created explicitly, never by a step. State per unit is listed
  // here and not in uses().
  virtual std::vector<StateField> state(const TensorSpec& tensor) const = 0;
  // Work for one assembled unit, in floating-point operations; balances owners. Equal on all ranks.
  virtual double cost(const TensorSpec& tensor, const UnitPlace& place) const = 0;
  // Scratch that a call for one assembled unit wants.
  virtual int64_t workspace_bytes(const TensorSpec&, const UnitPlace&) const { return 0; }
  virtual void run(const UnitView& view, const StepContext& context) const = 0;
  // Name and every hyperparameter in one line: compared across ranks with the plan and stored in checkpoints.
  virtual std::string describe() const = 0;
};

using UpdateOps = std::vector<std::shared_ptr<const UpdateOp>>;

}  // namespace dovetail

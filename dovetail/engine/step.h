// The optimizer step of one rank: reduction to the zero1 shard, norm, clipping, update operations.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/engine/engine.h"
#include "dovetail/engine/runner.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::engine_detail {

class Stepper {
 public:
  // Allocates all optimizer state. Throws ConfigError for a parameter that no operation applies
  // to, and for operations
  // whose unit a shard boundary of this plan cuts.
  Stepper(Context& context, Runner& runner, UpdateOps ops, ClipOptions norm, uint64_t seed);

  StepResult step(float lr, double grad_scale);
  // Per parameter of the plan: bytes of state per element.
  static std::vector<int64_t> state_bytes(const plan::Plan& plan, const UpdateOps& ops);
  // Appends the state fields of all parameters.
  void list_state(ShardedState& out, bool writer) const;

 private:
  // A field of one bucket-wide allocation: values over the group's zero1 element space.
  struct GroupField {
    DType dtype;
    Buffer buffer;
  };
  using GroupFields = std::map<std::string, GroupField>;

  void allocate(int64_t group);
  void run_ops(int64_t group, const GroupParameter& parameter, const StepContext& context);
  Field field_of(int64_t group, const GroupParameter& parameter, const std::string& name) const;

  Context& context_;
  Runner& runner_;
  UpdateOps ops_;
  std::vector<ParameterUpdate> updates_;  // per parameter of the plan
  ClipOptions norm_;
  uint64_t seed_;
  std::vector<GroupFields> fields_;  // per group
};

}  // namespace dovetail::engine_detail

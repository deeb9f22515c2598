// The optimizer step of one rank: reduction to the zero1 shard, norm, clipping, update operations.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/engine/engine.h"
#include "dovetail/engine/runner.h"
#include "dovetail/engine/state_store.h"
#include "dovetail/engine/unit_work.h"
#include "dovetail/engine/update_plan.h"

namespace dovetail::engine_detail {

class Stepper {
 public:
  // Allocates all optimizer state. Throws ConfigError for operations that do not fit the parameters.
  Stepper(Context& context, Runner& runner, UpdateOps ops, ClipOptions norm, uint64_t seed);

  StepResult step(float lr, double grad_scale);
  // Others that keep the same state and work on the same units; ConfigError else.
  void change_operations(UpdateOps ops);
  const UpdatePlan& update() const { return update_; }
  // Appends the state fields of all parameters.
  void list_state(ShardedState& out) const { state_.list(out); }
  // Bytes of fragments sent since the engine was built, by field.
  const std::map<std::string, int64_t>& sent() const { return units_.sent; }

 private:
  ClipResult measure(double grad_scale, std::vector<bool>& contributed);
  void update(const StepContext& step, const std::vector<bool>& takes_part);
  // Runs operations on this rank's part of the parameter up to the next one on assembled units.
  void advance(int64_t parameter, const StepContext& step);
  void start(size_t batch, const StepContext& step, const std::vector<bool>& takes_part);
  void finish(size_t batch, const StepContext& step, const std::vector<bool>& takes_part);
  bool updates(size_t batch, int64_t parameter, const std::vector<bool>& takes_part) const;

  Context& context_;
  Runner& runner_;
  UpdateOps ops_;
  UpdatePlan update_;
  ClipOptions norm_;
  uint64_t seed_;
  StateStore state_;
  Buffer workspace_;
  std::vector<Buffer> staging_;   // a slot for each batch under way
  UnitEnvironment units_;
  std::vector<UnitWork> batches_;
  std::vector<size_t> next_op_;   // per parameter, of its operations in this step
  size_t unfinished_ = 0;         // first batch that is not finished in this step
};

}  // namespace dovetail::engine_detail

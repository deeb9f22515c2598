// The engine: sharded data-parallel training of a module tree.
//
//   auto model = std::make_shared<ops::Unit<Llama>>(config);             // the same on every rank
//   Engine engine(model, world, options, make_optimizer(...));           // takes the parameters over
//   for (...) {
//     engine.set_gradient_sync(last_micro_batch);
//     auto loss = model->forward(x);  loss.backward();                   // gathers, reduces
//     StepResult r = engine.step(lr, 1.0 / tokens);                      // norm, clip, update
//   }
//
// All ranks make the same calls in the same order. After construction the module's parameters are
// *runtime parameters*:
// leaves of the compute dtype whose bytes exist only between the gather and the release of their unit; touching one
// outside is an error that names the unit. What is owned, updated, saved and loaded are the *update parameters*
// (parameters()): this rank's zero1 shard of the main weights.
//
// Gradients add up over backward passes until step(). They are sums over ranks (not means): step() multiplies them by
// its `grad_scale` once, after the full sum.
//
// Limits, each an error at the call: parameters and buffers must be materialised and dense, fp32 or
// bf16; a backward pass that builds a graph of parameter gradients (backward(create_graph=true)) is
// refused, torch::autograd::grad to inputs with a graph is fine.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/comm/group.h"
#include "dovetail/engine/trace.h"
#include "dovetail/engine/unit_model.h"
#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/unit.h"
#include "dovetail/plan/bytes.h"
#include "dovetail/plan/plan.h"
#include "dovetail/storage/ledger.h"
#include "dovetail/storage/state_entry.h"
#include "dovetail/update/clip.h"
#include "dovetail/update/op.h"

namespace torch::nn {
class Module;
}

namespace dovetail {

namespace engine_detail {
class EngineImpl;
}

enum class InitialWeights : uint8_t {
  must_agree,      // parameters and buffers are hashed and compared; a difference is an error that names the first
  broadcast_rank0  // rank 0's are used everywhere
};


struct EngineOptions {
  plan::PlanOptions plan;   // `world` is filled in from the group
  InitialWeights initial = InitialWeights::must_agree;
  ClipOptions norm;          // by default the norm is measured and nothing clipped
  bool cast_inputs = true;  // of the root's forward, to the compute dtype
  bool recompute = false;   // activation recomputation of every unit but the root
  uint64_t seed = 0;        // random bits of update operations
  // What is known of parameters beyond their shape, by name (kind, heads); others are guessed from the shape.
  std::vector<TensorSpec> hints;
};

struct StepResult {
  // of the gradient after grad_scale, before clipping; NaN and infinity are equal on all ranks
  double grad_norm = 0;
  float clip_coefficient = 1;
  bool skipped = false;       // the norm was not finite: no weight and no state was changed, no step was counted
};

// This rank's share of one update parameter.
struct UpdateParameter {
  const TensorSpec* spec;     // the global tensor
  int64_t group;              // index into plan().groups
  Interval elements;          // of the global tensor, row-major; empty where this rank owns none
  at::Tensor main;            // [elements.size()], main dtype; a view that keeps its memory alive, writes count
  // [elements.size()], fp32: the gradient of the zero1 shard, complete from the last reduction of step() until the next
  // forward, or as set_gradient_completion() says
  at::Tensor grad;
  bool trainable;
};

class Engine {
 public:
  // `root` must be an ops::Unit where it has parameters outside of all other units. Collective.
  Engine(std::shared_ptr<torch::nn::Module> root, std::shared_ptr<comm::Group> world, EngineOptions options,
         UpdateOps optimizer);
  // Of a model whose owner drives the units: calls hooks() around each forward of a unit. Tensors of the model must
  // outlive the engine's use of them. Collective.
  Engine(UnitModel model, std::shared_ptr<comm::Group> world, EngineOptions options, UpdateOps optimizer);
  ~Engine();  // gives the module's parameters back as unbound tensors; not collective

  const plan::Plan& plan() const;

  // To be called around the forward passes of a unit (plan order).
  std::shared_ptr<ops::UnitHooks> hooks(int64_t unit);
  // Where a kernel can write the gradient of a parameter (plan order) itself.
  std::shared_ptr<ops::GradientSink> sink(int64_t parameter);
  // Called when a backward pass begins, before any gradient is written, and at its end, when all reductions over zero2
  // ranks are done. May be null.
  void on_backward(std::function<void()> begin, std::function<void()> end);
  // Whether a backward pass is under way, as where it computes a checkpoint again. One that threw is not: it is left
  // first, which is collective. What it reduced until then is in the gradients.
  bool in_backward();
  int64_t broken_backwards() const;  // left so far
  // What was reduced so far counts no more. Also where a backward pass begins.
  void discard_gradients();
  // Per parameter: whether it has a gradient, reduced, that arrived on any rank since the last step or zero_grad().
  // Ranks also agree on the order of units, as in step(), which not all users call. Collective.
  std::vector<bool> have_gradients();
  // Multiplies the sums over ranks of the backward passes that follow; 1 until then. Equal on all ranks.
  void set_gradient_factor(float factor);
  // true: passes that reduce end with complete gradients of the zero1 shards, summed over all ranks, in parameters();
  // false, as at first: step() completes them. Equal on all ranks.
  void set_gradient_completion(bool complete);
  // Other update operations from the next step on; their state starts anew. ConfigError, and nothing changed, where
  // they do not fit the plan. Collective.
  void set_operations(UpdateOps ops);
  // The same operations with other hyperparameters: state goes on. ConfigError, and nothing changed, where they keep
  // other state or want other units. Collective.
  void change_operations(UpdateOps ops);

  // false: the following backward passes add to whole local gradients and communicate nothing; needs
  // PlanOptions::local_accumulation (or zero2 == 1).
  void set_gradient_sync(bool sync);

  // Ends an optimizer step: finishes the reduction, measures the norm, clips, runs the update operations. Collective.
  StepResult step(float lr, double grad_scale);
  // Drops the gradients gathered so far.
  void zero_grad();
  // The update operations with all their hyperparameters, in one line.
  std::string describe_optimizer() const;
  int64_t steps_done() const;
  void set_steps_done(int64_t steps);  // after loading a checkpoint

  // The update parameters, in plan order. Handing out writable views makes every later root forward
  // start from the main weights again.
  std::vector<UpdateParameter> parameters();
  // Main weight of parameter `index` (plan order), whole, in the main dtype, on every rank; a copy. Collective.
  at::Tensor whole_parameter(int64_t index);
  // Its gradient so far, whole, fp32, summed over all ranks and not scaled; a copy. Zero where it
  // has none. Collective.
  at::Tensor whole_gradient(int64_t index);
  // Replaces the gradient of this rank for the coming step by `gradient` (whole, fp32) as if
  // backward had produced it. For tests and custom gradients. Collective over all parameters in
  // plan order: call once for each.
  void inject_gradients(const std::vector<at::Tensor>& gradients);

  // Main weights and optimizer state, for checkpoints, in the same order on every rank.
  ShardedState state();
  std::vector<TensorAlias> aliases() const;
  // To be called after `state()` memory was written (load).
  void state_was_loaded();

  // One unit's runtime parameters, until release() or the end of a pass over it; outside of passes. Collective over the
  // ranks that gather.
  void gather(int64_t unit);
  void release(int64_t unit);
  // Keeps all units gathered until release_all(): generation and evaluation without repeated gathers. Collective.
  void gather_all();
  void release_all();

  // Measured, to be compared with plan::held_bytes and plan::sent_bytes.
  const Ledger& ledger() const;
  plan::HeldBytes held() const;
  plan::HeldBytes predicted_held() const;
  // Bytes of update fragments that this rank has sent so far, by field, and those of one step by the plan.
  const std::map<std::string, int64_t>& fragment_bytes_sent() const;
  std::map<std::string, int64_t> predicted_fragment_bytes() const;
  // Records what this rank does from now on; null: no more. Between passes. The caller may add spans around them.
  void record_into(std::shared_ptr<Trace> trace);
  // Who runs which unit of the update (plan::owner_report).
  std::string owner_report() const;

 private:
  std::shared_ptr<engine_detail::EngineImpl> impl_;
};

}  // namespace dovetail

// One optimizer step whose loss is the mean over all tokens of all ranks and micro-batches.
//
// Every micro-batch gives the *sum* of its token losses; sums are backpropagated, gradients are
// summed over micro-batches and ranks, and the one division by the number of tokens happens in
// Engine::step. So how tokens are spread over ranks and micro-batches never shows, and a
// micro-batch in which everything is masked adds nothing.
//
// Between backward and update the ranks exchange one small message: losses, token counts and wishes
// to stop. Whatever one rank sees (a loss that is not finite, a signal), all ranks act on in the
// same step.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"

namespace dovetail::trainer {

struct MicroLoss {
  at::Tensor sum;      // 0-dim, sum of token losses, with its graph
  int64_t tokens = 0;  // that are not masked
};

enum class StepOutcome : uint8_t {
  updated,
  no_tokens,        // everything was masked on all ranks: nothing changed
  non_finite_loss,  // on some rank: nothing changed
  non_finite_norm,  // of the gradient: nothing changed
};
std::string_view name_of(StepOutcome outcome);

struct StepReport {
  StepOutcome outcome = StepOutcome::updated;
  double loss = 0;       // nats per token over all ranks; NaN where there was no token
  int64_t tokens = 0;    // over all ranks
  double grad_norm = 0;  // 0 unless updated or non_finite_norm
  double clip_coefficient = 1;
  int bad_rank = -1;  // for non_finite_loss: the first rank that saw one
  bool stop = false;  // some rank wants to stop
};

struct WeightedStep {
  int64_t micro_batches = 1;
  bool reduce_each = true;  // reduce gradients after every micro-batch; false: after the last one
                            // (local accumulation)
  float lr = 0;
  std::function<MicroLoss(int64_t micro_batch)> forward;
  std::function<bool()> wants_to_stop;  // asked once, after the last backward pass
};

// Collective; every rank gives the same number of micro-batches, which is compared. `world` is the
// engine's. Losses are added in the order of global micro-batch numbers, a*ranks + rank, in double.
StepReport run_step(Engine& engine, comm::Group& world, const WeightedStep& step);

}  // namespace dovetail::trainer

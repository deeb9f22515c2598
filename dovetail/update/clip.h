// Clipping by global norm in two steps. Each holder of gradient fragments adds every element that
// it answers for to a ReproducibleSum, each element in exactly one sum; all sums, serialized, then
// give the norm. The sums are exact, so the norm is the same for every way the elements are dealt
// out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "dovetail/numerics/reproducible_sum.h"

namespace dovetail {

enum class NormKind : uint8_t { two, infinity };

struct ClipOptions {
  NormKind kind = NormKind::two;
  // Infinity measures the norm and never clips.
  double max_norm = std::numeric_limits<double>::infinity();
};

struct ClipResult {
  double norm = 0;        // of the gradients after loss_scale
  float coefficient = 1;  // min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_
  float grad_scale = 1;   // loss_scale * coefficient: for StepContext::grad_scale
  bool finite = true;     // false: norm is NaN or infinite, and the step is to be skipped
  int64_t elements = 0;   // that took part; a caller who knows how many there are checks it
};

// `partials` holds one or more serialized sums (ReproducibleSum::kBytes each) one after the other,
// of gradients as reduced. `loss_scale` is the factor that still has to be applied to them, such as
// 1 / weight of the loss. Throws ConfigError unless max_norm is above 0.
ClipResult clip_by_global_norm(std::span<const std::byte> partials, const ClipOptions& options,
                               double loss_scale);

}  // namespace dovetail

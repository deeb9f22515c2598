#include "dovetail/update/clip.h"

#include <algorithm>
#include <cmath>

#include "dovetail/base/error.h"

namespace dovetail {

ClipResult clip_by_global_norm(std::span<const std::byte> partials, const ClipOptions& options,
                               double loss_scale) {
  constexpr size_t bytes = ReproducibleSum::kBytes;
  if (!(options.max_norm > 0))
    raise<ConfigError>("clip: max_norm must be above 0, got {}", options.max_norm);
  DT_CHECK(!partials.empty() && partials.size() % bytes == 0,
           "clip: {} bytes are no list of sums of {} bytes", partials.size(), bytes);

  ReproducibleSum total;
  for (size_t at = 0; at < partials.size(); at += bytes)
    total.merge(ReproducibleSum::from_bytes(partials.subspan(at).first<bytes>()));

  ClipResult result;
  result.elements = total.count();
  const double unscaled =
      options.kind == NormKind::two ? std::sqrt(total.result()) : total.max_abs();
  result.norm = unscaled * std::abs(loss_scale);
  result.finite = std::isfinite(result.norm);
  if (!result.finite) return result;

  const double coefficient = std::min(1.0, options.max_norm / (result.norm + 1e-6));
  result.coefficient = static_cast<float>(coefficient);
  result.grad_scale = static_cast<float>(loss_scale * coefficient);
  return result;
}

}  // namespace dovetail

// AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay
// Regularization", 2019). One pass over memory.
//
//   g = grad * grad_scale
//   m  = beta1 * m + (1 - beta1) * g
//   v  = beta2 * v + (1 - beta2) * g * g
//   w -= lr * weight_decay * w + lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)
//
// in fp32 per element, coefficients in double. t is the optimizer's step, also for a parameter that
// was frozen in earlier steps.
#pragma once

#include <span>

#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"

namespace dovetail {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
};

// Throws ConfigError, in the name of an operation, unless 0 <= beta < 1 and eps > 0 as fp32.
void validate(const AdamWOptions& options, std::string_view operation);

// The scalars of one step for one parameter.
struct AdamWCoefficients {
  float grad_scale;
  float beta1, gain1;   // gain1 = 1 - beta1
  float beta2, gain2;   // gain2 = 1 - beta2
  float inverse_bias2;  // 1 / sqrt(1 - beta2^t)
  float eps;
  float decay;  // lr * weight_decay
  float rate;   // lr / (1 - beta1^t)
};

AdamWCoefficients adamw_coefficients(const AdamWOptions& options, const ParameterFactors& factors,
                                     const StepContext& context);

// All spans have the same size. An element's result depends on that element alone: spans may be cut
// anywhere.
void adamw_update(const AdamWCoefficients& coefficients, std::span<float> weight,
                  std::span<const float> grad, std::span<float> m, std::span<float> v);

// State: "exp_avg" (m) and "exp_avg_sq" (v), fp32, zero at first.
class AdamW final : public UpdateOp {
 public:
  // Throws ConfigError unless 0 <= beta < 1 and eps > 0.
  AdamW(AdamWOptions options, ParameterRules rules);

  std::string_view name() const override { return "adamw"; }
  bool applies_to(const TensorSpec& tensor) const override { return rules_.selects(name(), tensor); }
  Unit unit(const TensorSpec&) const override { return {}; }
  std::vector<FieldUse> uses(const TensorSpec& tensor) const override;
  std::vector<StateField> state(const TensorSpec& tensor) const override;
  double cost(const TensorSpec& tensor, const UnitPlace& place) const override;
  void run(const UnitView& view, const StepContext& context) const override;
  std::string describe() const override;

 private:
  AdamWOptions options_;
  ParameterRules rules_;
};

}  // namespace dovetail

// Stochastic gradient descent with momentum, one pass over memory. Formula as torch.optim.SGD:
//
//   g = grad * grad_scale  (+ weight_decay * w with Decay::l2)
//   b = momentum * b + (1 - dampening) * g        (step 1: b = g)
//   u = g + momentum * b with nesterov, b without, g when momentum is 0
//   w -= lr * u            (+ lr * weight_decay * w with Decay::decoupled)
//
// in fp32 per element, coefficients in double.
#pragma once

#include <span>

#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"

namespace dovetail {

// Where weight decay enters: l2 adds it to the gradient, so that it passes through the momentum;
// decoupled takes it off the weight beside the step.
enum class Decay : uint8_t { l2, decoupled };

struct SgdOptions {
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  Decay decay = Decay::l2;
};

// The scalars of one step for one parameter.
struct SgdCoefficients {
  float grad_scale;
  float l2;              // weight decay that is added to the gradient
  float momentum, gain;  // gain = 1 - dampening, 1 in step 1
  float rate;            // lr
  float decay;           // lr * weight decay that is taken off the weight
};

SgdCoefficients sgd_coefficients(const SgdOptions& options, const ParameterFactors& factors,
                                 const StepContext& context);

// Both spans have the same size and may be cut anywhere.
void sgd_update(const SgdCoefficients& coefficients, std::span<float> weight,
                std::span<const float> grad);
// The same with momentum; buffer is b.
void sgd_momentum_update(const SgdCoefficients& coefficients, bool nesterov,
                         std::span<float> weight, std::span<const float> grad,
                         std::span<float> buffer);

// State: "momentum_buffer" (b), fp32, zero at first; none when momentum is 0.
class Sgd final : public UpdateOp {
 public:
  // Throws ConfigError unless 0 <= momentum < 1, 0 <= dampening <= 1, and nesterov and dampening
  // come with what they need: nesterov with momentum and no dampening, dampening with momentum.
  Sgd(SgdOptions options, ParameterRules rules);

  std::string_view name() const override { return "sgd"; }
  bool applies_to(const TensorSpec& tensor) const override { return rules_.selects(name(), tensor); }
  Unit unit(const TensorSpec&) const override { return {}; }
  std::vector<FieldUse> uses(const TensorSpec& tensor) const override;
  std::vector<StateField> state(const TensorSpec& tensor) const override;
  double cost(const TensorSpec& tensor, const UnitPlace& place) const override;
  void run(const UnitView& view, const StepContext& context) const override;
  std::string describe() const override;

 private:
  SgdOptions options_;
  ParameterRules rules_;
};

}  // namespace dovetail

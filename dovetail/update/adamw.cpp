#include "dovetail/update/adamw.h"

#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr std::string_view kM = "exp_avg";
constexpr std::string_view kV = "exp_avg_sq";

DT_VECTOR_CLONES void update(const AdamWCoefficients c, float* __restrict weight,
                             const float* __restrict grad, float* __restrict m, float* __restrict v,
                             int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_scale;
    const float mean = c.beta1 * m[i] + c.gain1 * g;
    const float square = c.beta2 * v[i] + c.gain2 * g * g;
    const float denominator = std::sqrt(square) * c.inverse_bias2 + c.eps;
    m[i] = mean;
    v[i] = square;
    weight[i] -= c.decay * weight[i] + c.rate * (mean / denominator);
  }
}

}  // namespace

void validate(const AdamWOptions& o, std::string_view operation) {
  for (const auto& [beta, name] : {std::pair(o.beta1, "beta1"), std::pair(o.beta2, "beta2")})
    if (!(beta >= 0 && beta < 1))
      raise<ConfigError>("{}: {} must be at least 0 and below 1, got {}", operation, name, beta);
  if (!(std::isfinite(o.eps) && static_cast<float>(o.eps) > 0))
    raise<ConfigError>("{}: eps must be a positive fp32 number, got {}", operation, o.eps);
}

AdamWCoefficients adamw_coefficients(const AdamWOptions& options, const ParameterFactors& factors,
                                     const StepContext& context) {
  DT_CHECK_GE(context.step, 1, "adamw");
  const double lr = context.lr * factors.lr_scale;
  const auto t = static_cast<double>(context.step);
  const auto f = [](double x) { return static_cast<float>(x); };
  return {.grad_scale = context.grad_scale,
          .beta1 = f(options.beta1),
          .gain1 = f(1 - options.beta1),
          .beta2 = f(options.beta2),
          .gain2 = f(1 - options.beta2),
          .inverse_bias2 = f(1 / std::sqrt(1 - std::pow(options.beta2, t))),
          .eps = f(options.eps),
          .decay = f(lr * factors.weight_decay),
          .rate = f(lr / (1 - std::pow(options.beta1, t)))};
}

void adamw_update(const AdamWCoefficients& coefficients, std::span<float> weight,
                  std::span<const float> grad, std::span<float> m, std::span<float> v) {
  DT_CHECK_EQ(grad.size(), weight.size(), "adamw: grad and weight");
  DT_CHECK_EQ(m.size(), weight.size(), "adamw: exp_avg and weight");
  DT_CHECK_EQ(v.size(), weight.size(), "adamw: exp_avg_sq and weight");
  update(coefficients, weight.data(), grad.data(), m.data(), v.data(),
         static_cast<int64_t>(weight.size()));
}

AdamW::AdamW(AdamWOptions options, ParameterRules rules)
    : options_(options), rules_(std::move(rules)) {
  validate(options_, name());
}

std::vector<FieldUse> AdamW::uses(const TensorSpec&) const {
  return {{std::string(kWeight), Access::read_write},
          {std::string(kGrad), Access::read},
          {std::string(kM), Access::read_write},
          {std::string(kV), Access::read_write}};
}

std::vector<StateField> AdamW::state(const TensorSpec&) const {
  return {{std::string(kM), DType::f32, 0}, {std::string(kV), DType::f32, 0}};
}

double AdamW::cost(const TensorSpec&, const UnitPlace& place) const {
  return 16.0 * static_cast<double>(place.numel());
}

void AdamW::run(const UnitView& view, const StepContext& context) const {
  const auto coefficients = adamw_coefficients(options_, rules_.factors(*view.tensor), context);
  adamw_update(coefficients, view.f32(kWeight), view.f32(kGrad), view.f32(kM),
               view.f32(kV));
}

std::string AdamW::describe() const {
  return fmt::format("adamw beta1={} beta2={} eps={} {}", options_.beta1, options_.beta2,
                     options_.eps, rules_.describe());
}

}  // namespace dovetail

#include "dovetail/update/sgd.h"

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr std::string_view kBuffer = "momentum_buffer";

DT_VECTOR_CLONES void update(const SgdCoefficients c, float* __restrict weight,
                             const float* __restrict grad, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_scale + c.l2 * weight[i];
    weight[i] -= c.rate * g + c.decay * weight[i];
  }
}

DT_VECTOR_CLONES void update_momentum(const SgdCoefficients c, float* __restrict weight,
                                      const float* __restrict grad, float* __restrict buffer,
                                      int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_scale + c.l2 * weight[i];
    buffer[i] = c.momentum * buffer[i] + c.gain * g;
    weight[i] -= c.rate * buffer[i] + c.decay * weight[i];
  }
}

DT_VECTOR_CLONES void update_nesterov(const SgdCoefficients c, float* __restrict weight,
                                      const float* __restrict grad, float* __restrict buffer,
                                      int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * c.grad_scale + c.l2 * weight[i];
    buffer[i] = c.momentum * buffer[i] + c.gain * g;
    weight[i] -= c.rate * (g + c.momentum * buffer[i]) + c.decay * weight[i];
  }
}

std::string_view name_of(Decay decay) { return decay == Decay::l2 ? "l2" : "decoupled"; }

}  // namespace

SgdCoefficients sgd_coefficients(const SgdOptions& options, const ParameterFactors& factors,
                                 const StepContext& context) {
  DT_CHECK_GE(context.step, 1, "sgd");
  const double lr = context.lr * factors.lr_scale;
  const bool l2 = options.decay == Decay::l2;
  const auto f = [](double x) { return static_cast<float>(x); };
  return {.grad_scale = context.grad_scale,
          .l2 = l2 ? f(factors.weight_decay) : 0,
          .momentum = f(options.momentum),
          .gain = context.step == 1 ? 1 : f(1 - options.dampening),
          .rate = f(lr),
          .decay = l2 ? 0 : f(lr * factors.weight_decay)};
}

void sgd_update(const SgdCoefficients& coefficients, std::span<float> weight,
                std::span<const float> grad) {
  DT_CHECK_EQ(grad.size(), weight.size(), "sgd: grad and weight");
  update(coefficients, weight.data(), grad.data(), static_cast<int64_t>(weight.size()));
}

void sgd_momentum_update(const SgdCoefficients& coefficients, bool nesterov,
                         std::span<float> weight, std::span<const float> grad,
                         std::span<float> buffer) {
  DT_CHECK_EQ(grad.size(), weight.size(), "sgd: grad and weight");
  DT_CHECK_EQ(buffer.size(), weight.size(), "sgd: momentum_buffer and weight");
  const auto kernel = nesterov ? update_nesterov : update_momentum;
  kernel(coefficients, weight.data(), grad.data(), buffer.data(),
         static_cast<int64_t>(weight.size()));
}

Sgd::Sgd(SgdOptions options, ParameterRules rules) : options_(options), rules_(std::move(rules)) {
  if (!(options_.momentum >= 0 && options_.momentum < 1))
    raise<ConfigError>("sgd: momentum must be at least 0 and below 1, got {}", options_.momentum);
  if (!(options_.dampening >= 0 && options_.dampening <= 1))
    raise<ConfigError>("sgd: dampening must be at least 0 and at most 1, got {}",
                       options_.dampening);
  if (options_.dampening != 0 && options_.momentum == 0)
    raise<ConfigError>("sgd: dampening {} needs momentum above 0", options_.dampening);
  if (options_.nesterov && (options_.momentum == 0 || options_.dampening != 0))
    raise<ConfigError>("sgd: nesterov needs momentum above 0 and dampening 0, got {} and {}",
                       options_.momentum, options_.dampening);
}

std::vector<FieldUse> Sgd::uses(const TensorSpec&) const {
  std::vector<FieldUse> fields = {{std::string(kWeight), Access::read_write},
                                  {std::string(kGrad), Access::read}};
  if (options_.momentum != 0) fields.push_back({std::string(kBuffer), Access::read_write});
  return fields;
}

std::vector<StateField> Sgd::state(const TensorSpec&) const {
  if (options_.momentum == 0) return {};
  return {{std::string(kBuffer), DType::f32, 0}};
}

double Sgd::cost(const TensorSpec&, const UnitPlace& place) const {
  return (options_.momentum == 0 ? 7.0 : 10.0) * static_cast<double>(place.numel());
}

void Sgd::run(const UnitView& view, const StepContext& context) const {
  const auto coefficients = sgd_coefficients(options_, rules_.factors(*view.tensor), context);
  if (options_.momentum == 0) {
    sgd_update(coefficients, view.f32(kWeight), view.f32(kGrad));
  } else {
    sgd_momentum_update(coefficients, options_.nesterov, view.f32(kWeight), view.f32(kGrad),
                        view.f32(kBuffer));
  }
}

std::string Sgd::describe() const {
  return fmt::format("sgd momentum={} dampening={} nesterov={} decay={} {}", options_.momentum,
                     options_.dampening, options_.nesterov, name_of(options_.decay),
                     rules_.describe());
}

}  // namespace dovetail

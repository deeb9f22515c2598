#include "dovetail/update/adam8.h"

#include <algorithm>
#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr std::string_view kM = "exp_avg", kV = "exp_avg_sq";
constexpr std::string_view kMCode = "exp_avg_code", kMScale = "exp_avg_scale";
constexpr std::string_view kVCode = "exp_avg_sq_code", kVScale = "exp_avg_sq_scale";

// Asks for n elements that are not yet needed: while one block is encoded nothing else would be.
[[gnu::always_inline]] inline void prefetch(const float* weight, const float* grad,
                                            const uint8_t* m_code, const uint8_t* v_code,
                                            int64_t n) {
  constexpr int64_t line = 64;
  for (int64_t i = 0; i < n; i += line / 4) {
    __builtin_prefetch(weight + i, 1);
    __builtin_prefetch(grad + i);
  }
  for (int64_t i = 0; i < n; i += line) {
    __builtin_prefetch(m_code + i, 1);
    __builtin_prefetch(v_code + i, 1);
  }
}

// One block of n elements; its moments pass through the stack, that is, the first-level cache.
[[gnu::always_inline]] inline void update_block(
    const AdamWCoefficients& c, const DynamicMap& __restrict m_map,
    const DynamicMap& __restrict v_map, float* __restrict weight, const float* __restrict grad,
    uint8_t* __restrict m_code, float* __restrict m_scale, uint8_t* __restrict v_code,
    float* __restrict v_scale, int64_t n) {
  // Compilers gather with offsets of the elements' width only. The gathers stand in the loop with
  // the root and the quotient: they use other parts of the processor.
  alignas(64) int32_t m_entry[kCodeBlock], v_entry[kCodeBlock];
  for (int64_t i = 0; i < n; ++i) m_entry[i] = m_code[i];
  for (int64_t i = 0; i < n; ++i) v_entry[i] = v_code[i];
  alignas(64) float m[kCodeBlock], v[kCodeBlock];
  int32_t m_largest = 0, v_largest = 0;
  const float m_unit = *m_scale, v_unit = *v_scale;
  for (int64_t i = 0; i < n; ++i) {
    // As in adamw.cpp, operation by operation: a test holds the bits together.
    const float g = grad[i] * c.grad_scale;
    const float mean = c.beta1 * (m_map.values[m_entry[i]] * m_unit) + c.gain1 * g;
    const float square = c.beta2 * (v_map.values[v_entry[i]] * v_unit) + c.gain2 * g * g;
    const float denominator = std::sqrt(square) * c.inverse_bias2 + c.eps;
    m[i] = mean;
    v[i] = square;
    weight[i] -= c.decay * weight[i] + c.rate * (mean / denominator);
    const int32_t m_bits = blockwise8::magnitude_bits(mean),
                  v_bits = blockwise8::magnitude_bits(square);
    m_largest = m_largest > m_bits ? m_largest : m_bits;
    v_largest = v_largest > v_bits ? v_largest : v_bits;
  }
  *m_scale = blockwise8::encode_block<CodeSign::with_sign>(m_map, m, m_largest, m_code, n);
  *v_scale = blockwise8::encode_block<CodeSign::positive>(v_map, v, v_largest, v_code, n);
}

DT_VECTOR_CLONES void update(const AdamWCoefficients c, const DynamicMap& __restrict m_map,
                             const DynamicMap& __restrict v_map, float* __restrict weight,
                             const float* __restrict grad, uint8_t* __restrict m_code,
                             float* __restrict m_scale, uint8_t* __restrict v_code,
                             float* __restrict v_scale, int64_t n) {
  // Whole blocks with a size that the compiler knows; the last one of the tensor has any.
  constexpr int64_t block = kCodeBlock, ahead = 2 * block;
  int64_t i = 0;
  for (; i + block <= n; i += block) {
    if (i + ahead + block <= n)
      prefetch(weight + i + ahead, grad + i + ahead, m_code + i + ahead, v_code + i + ahead, block);
    update_block(c, m_map, v_map, weight + i, grad + i, m_code + i, m_scale++, v_code + i,
                 v_scale++, block);
  }
  if (i < n)
    update_block(c, m_map, v_map, weight + i, grad + i, m_code + i, m_scale, v_code + i, v_scale,
                 n - i);
}

void check_sizes(size_t n, size_t grad, const Adam8Moments& moments) {
  const auto blocks = static_cast<size_t>(ceil_div(static_cast<int64_t>(n), kCodeBlock));
  DT_CHECK_EQ(grad, n, "adam8: grad and weight");
  DT_CHECK_EQ(moments.m_code.size(), n, "adam8: exp_avg_code and weight");
  DT_CHECK_EQ(moments.v_code.size(), n, "adam8: exp_avg_sq_code and weight");
  DT_CHECK_EQ(moments.m_scale.size(), blocks, "adam8: exp_avg_scale and blocks");
  DT_CHECK_EQ(moments.v_scale.size(), blocks, "adam8: exp_avg_sq_scale and blocks");
}

}  // namespace

void adam8_update(const AdamWCoefficients& coefficients, std::span<float> weight,
                  std::span<const float> grad, const Adam8Moments& moments) {
  check_sizes(weight.size(), grad.size(), moments);
  update(coefficients, dynamic_map(CodeSign::with_sign), dynamic_map(CodeSign::positive),
         weight.data(), grad.data(), moments.m_code.data(), moments.m_scale.data(),
         moments.v_code.data(), moments.v_scale.data(), static_cast<int64_t>(weight.size()));
}

void adam8_update_reference(const AdamWCoefficients& coefficients, std::span<float> weight,
                            std::span<const float> grad, const Adam8Moments& moments) {
  check_sizes(weight.size(), grad.size(), moments);
  std::vector<float> m(weight.size()), v(weight.size());
  decode_blockwise8_reference(CodeSign::with_sign, moments.m_code, moments.m_scale, m);
  decode_blockwise8_reference(CodeSign::positive, moments.v_code, moments.v_scale, v);
  adamw_update(coefficients, weight, grad, m, v);
  encode_blockwise8_reference(CodeSign::with_sign, m, moments.m_code, moments.m_scale);
  encode_blockwise8_reference(CodeSign::positive, v, moments.v_code, moments.v_scale);
}

Adam8::Adam8(AdamWOptions options, ParameterRules rules)
    : options_(options), rules_(std::move(rules)) {
  validate(options_, name());
}

Unit Adam8::unit(const TensorSpec& tensor) const {
  return is_8bit(tensor) ? Unit::of_block(kCodeBlock) : Unit{};
}

std::vector<FieldUse> Adam8::uses(const TensorSpec& tensor) const {
  std::vector<FieldUse> fields = {{std::string(kWeight), Access::read_write},
                                  {std::string(kGrad), Access::read}};
  for (const StateField& field : state(tensor)) fields.push_back({field.name, Access::read_write});
  return fields;
}

std::vector<StateField> Adam8::state(const TensorSpec& tensor) const {
  if (!is_8bit(tensor)) return {{.name = std::string(kM)}, {.name = std::string(kV)}};
  const auto code = [](std::string_view name, CodeSign sign) {
    return StateField{.name = std::string(name),
                      .dtype = DType::u8,
                      .initial = static_cast<float>(zero_code(sign))};
  };
  const auto scale = [](std::string_view name) {
    return StateField{
        .name = std::string(name), .per = StateField::Per::block, .block = kCodeBlock};
  };
  return {code(kMCode, CodeSign::with_sign), scale(kMScale), code(kVCode, CodeSign::positive),
          scale(kVScale)};
}

double Adam8::cost(const TensorSpec& tensor, const UnitPlace& place) const {
  return (is_8bit(tensor) ? 20.0 : 16.0) * static_cast<double>(place.numel());
}

void Adam8::run(const UnitView& view, const StepContext& context) const {
  const TensorSpec& tensor = *view.tensor;
  const auto coefficients = adamw_coefficients(options_, rules_.factors(tensor), context);
  if (!is_8bit(tensor)) {
    adamw_update(coefficients, view.f32(kWeight), view.f32(kGrad), view.f32(kM), view.f32(kV));
    return;
  }
  const Interval run = view.elements();
  DT_CHECK(run.empty() || (run.begin % kCodeBlock == 0 &&
                           (run.end % kCodeBlock == 0 || run.end == tensor.numel())),
           "adam8: elements {} to {} of {} cut a block of {}", run.begin, run.end, tensor.name,
           kCodeBlock);
  adam8_update(coefficients, view.f32(kWeight), view.f32(kGrad),
               {view.u8(kMCode), view.f32(kMScale), view.u8(kVCode), view.f32(kVScale)});
}

std::string Adam8::describe() const {
  return fmt::format("adam8 beta1={} beta2={} eps={} block={} least_8bit_elements={} {}",
                     options_.beta1, options_.beta2, options_.eps, kCodeBlock, kLeast8BitElements,
                     rules_.describe());
}

}  // namespace dovetail

// AdamW with 8-bit moments: the formula and coefficients of update/adamw.h, decoupled weight decay
// included, with m and v kept in the block-wise codes of numerics/blockwise8.h (Dettmers et al.,
// "8-bit Optimizers via Block-wise Quantization", ICLR 2022). One pass over memory: each block of
// 256 elements is decoded, updated in fp32 and encoded; the weight moves by the exact moments of
// the step, the codes are only what the next step starts from.
//
// 16 bytes a step and element travel, against 28 of fp32 AdamW; the state is 2.03 bytes an element
// against 8.
//
// Which tensors: those of at least 4096 elements (the limit of bitsandbytes and torchao), whatever
// part a rank holds. Smaller ones keep fp32 moments and are AdamW bit for bit. Blocks are counted
// from the start of the global tensor, and no shard cuts one, so codes and scales do not depend on
// the shards.
//
// Second moments that vanish. Rounded to the nearest code, v below 1.6e-7 of its block's largest
// becomes 0, while m of the same element (in proportion to the root of v) survives: the next small
// gradient then moves the weight by about lr * m / eps. bitsandbytes
// (kOptimizerStatic8bit2StateBlockwise) and torchao (OptimState8bit) round v to the nearest code
// and accept that; bitsandbytes guards the sign of m only. Here v > 0 never gets the code of 0: it
// is kept as at least 3.25e-7 of the block's largest, so that what is lost is lost to smaller
// steps. Li, Chen and Zhu ("Memory Efficient Optimizers with 4-bit States", NeurIPS 2023) exclude 0
// from the map for the same reason; we keep it for exact zeros, so that elements without a gradient
// (rows of embeddings) stay without a state.
//
// A gradient that is not finite, or whose square is not, makes its whole block NaN, at the latest
// in the next step (numerics/blockwise8.h).
#pragma once

#include <span>

#include "dovetail/numerics/blockwise8.h"
#include "dovetail/update/adamw.h"
#include "dovetail/update/op.h"
#include "dovetail/update/rules.h"

namespace dovetail {

inline constexpr int64_t kLeast8BitElements = 4096;  // smaller tensors keep fp32 moments

// Moments of n elements that start at a multiple of 256 of the global tensor.
struct Adam8Moments {
  std::span<uint8_t> m_code;  // n
  std::span<float> m_scale;   // ceil(n / 256)
  std::span<uint8_t> v_code;  // n
  std::span<float> v_scale;   // ceil(n / 256)
};

// Weight and grad have n elements. Spans may be cut at multiples of 256.
void adam8_update(const AdamWCoefficients& coefficients, std::span<float> weight,
                  std::span<const float> grad, const Adam8Moments& moments);
// Scalar reference: decode, adamw_update, encode, by the references of each; the same bits.
void adam8_update_reference(const AdamWCoefficients& coefficients, std::span<float> weight,
                            std::span<const float> grad, const Adam8Moments& moments);

// State of a tensor with 8-bit moments: "exp_avg_code" and "exp_avg_sq_code", u8 per element, the
// codes of 0 at first; "exp_avg_scale" and "exp_avg_sq_scale", fp32 per block of 256 elements, 0 at
// first. Of others: as AdamW.
class Adam8 final : public UpdateOp {
 public:
  // Throws ConfigError unless 0 <= beta < 1 and eps > 0.
  Adam8(AdamWOptions options, ParameterRules rules);

  std::string_view name() const override { return "adam8"; }
  bool applies_to(const TensorSpec& tensor) const override {
    return rules_.selects(name(), tensor);
  }
  Unit unit(const TensorSpec& tensor) const override;
  std::vector<FieldUse> uses(const TensorSpec& tensor) const override;
  std::vector<StateField> state(const TensorSpec& tensor) const override;
  double cost(const TensorSpec& tensor, const UnitPlace& place) const override;
  // A run of an 8-bit tensor starts at a multiple of 256 of it and ends at one or with the tensor.
  void run(const UnitView& view, const StepContext& context) const override;
  std::string describe() const override;

  static bool is_8bit(const TensorSpec& tensor) { return tensor.numel() >= kLeast8BitElements; }

 private:
  AdamWOptions options_;
  ParameterRules rules_;
};

}  // namespace dovetail

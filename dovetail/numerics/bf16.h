// fp32 <-> bf16. A bf16 value is the upper half of an fp32 value and is held in a uint16_t.
//
// Rounding is to nearest, ties to even, as in IEEE 754: finite values from 0x7f7f8000 (3.39615e38)
// up become infinity, fp32 denormals round like any other value. NaN stays NaN: sign and upper
// payload are kept, the quiet bit is set.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace dovetail {

// Scalar reference; the spans below give the same bits.
constexpr uint16_t bf16_from_f32(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// Exact.
constexpr float f32_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// f32_from_bf16(bf16_from_f32(value)), by a select in place of the branch, so that loops become vector code.
constexpr float bf16_rounded(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  const uint32_t nan = u | 0x400000u, rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return std::bit_cast<float>(((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded) & 0xffff0000u);
}

// Whether this CPU multiplies bf16 values (AVX512_BF16, AMX); else products are faster in fp32.
bool bf16_products_in_hardware();

// Source and target have the same size and do not overlap.
void encode_bf16(std::span<const float> source, std::span<uint16_t> target);
void decode_bf16(std::span<const uint16_t> source, std::span<float> target);
// bf16_rounded of each value.
void round_to_bf16(std::span<float> values);

}  // namespace dovetail

// Block-wise dynamic 8-bit codes of optimizer state (Dettmers, Lewis, Shleifer and Zettlemoyer,
// "8-bit Optimizers via Block-wise Quantization", ICLR 2022; the type is from Dettmers, "8-Bit
// Approximations for Parallelism in Deep Learning", ICLR 2016).
//
// Values come in blocks of 256, the last one possibly shorter, counted from the start of a span. A
// block has one fp32 scale, its largest |x|, and a code for each value: the number of the entry of
// a fixed map that is nearest to x / scale.
//
//   decode: x' = map[code] * scale, one fp32 product
//   encode: y = x / scale, one fp32 quotient; then the entry nearest to y, by exact comparison
//           with the midpoints between entries; a midpoint goes to the entry of larger magnitude
//
// Maps (bitsandbytes functional.create_dynamic_map, torchao optim/quant_utils.py, both with 8 bits
// and 7 exponent bits): decade i = 0..6 is the interval from 10^(i-7) to 10^(i-6), cut into n equal
// parts, whose middles are entries; n is 2^i for the signed map and 2^(i+1) for the unsigned one.
// The signed map has their negatives too; both have 0 and 1. Part j of decade i has its middle at
// 10^(i-6) * (0.1 + 0.9 * (j + 0.5) / n) = (2n + 18j + 9) / (20 n 10^(6-i)). We round that quotient
// once to fp32; the published code builds it from fp32 steps, whose last bit depends on the vector
// width of torch.linspace, and lies within 1.5e-7 of ours, relatively.
//
// What the maps imply: the signed one has no -1, so that -scale comes back as -0.993 scale; |y|
// below 2.75e-7 becomes 0. We depart from the published rounding in one place: the unsigned code of
// a value above 0 is never that of 0, so that values below 1.6e-7 of the scale round up to the
// smallest entry, 3.25e-7 (update/adam8.h says why).
//
// Special values. A block of zeros of either sign has scale 0 and comes back as +0. A block with an
// infinity or a NaN has scale NaN, the codes of 0, and comes back as NaN entirely: an overflow
// never passes for a number. Denormal scales are like all others: |x| <= scale, so no quotient
// overflows. The unsigned code of a negative value is that of 0.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

namespace dovetail {

inline constexpr int64_t kCodeBlock = 256;  // values that share a scale

enum class CodeSign : uint8_t {
  with_sign,  // first moments: entries from -0.993 to 1
  positive,   // second moments: entries from 0 to 1
};

// The code of 0.
constexpr uint8_t zero_code(CodeSign sign) { return sign == CodeSign::with_sign ? 127 : 0; }

// The entries in ascending order, and a table that finds the nearest one.
struct DynamicMap {
  // Bins of magnitudes by their upper 16 bits: exponent and 7 bits of the mantissa, from 2^-22
  // to 1. No bin holds more than one midpoint. What lies below the first bin gets the entry of the
  // first bin.
  static constexpr int32_t kFirstBin = (127 - 22) << 7, kLastBin = 127 << 7;

  alignas(64) std::array<float, 256> values;
  // Of bin b: 65536 * (entry of the bin's start, counted from that of 0), plus, where a midpoint
  // lies in the bin, 65536 less the lower 16 bits of the first magnitude that goes to the entry
  // above it. Adding a magnitude's lower 16 bits and dropping 16 bits therefore gives its entry.
  alignas(64) std::array<int32_t, kLastBin - kFirstBin + 1> bins;
};

const DynamicMap& dynamic_map(CodeSign sign);

// All spans of values and codes have the same size n, of scales ceil(n / 256); source and target do
// not overlap. Spans may be cut at multiples of 256.
void encode_blockwise8(CodeSign sign, std::span<const float> values, std::span<uint8_t> codes,
                       std::span<float> scales);
void decode_blockwise8(CodeSign sign, std::span<const uint8_t> codes, std::span<const float> scales,
                       std::span<float> values);

// Scalar reference, from the map's entries alone; the same bits.
void encode_blockwise8_reference(CodeSign sign, std::span<const float> values,
                                 std::span<uint8_t> codes, std::span<float> scales);
void decode_blockwise8_reference(CodeSign sign, std::span<const uint8_t> codes,
                                 std::span<const float> scales, std::span<float> values);

// Pieces of one block of n <= 256 values, to be inlined into kernels that hold them anyhow: loops
// that become vector code under DT_VECTOR_CLONES.
namespace blockwise8 {

// Orders magnitudes like integers, infinity and NaN last; a maximum of these is the same in any
// order.
inline int32_t magnitude_bits(float x) { return std::bit_cast<int32_t>(x) & 0x7fffffff; }

template <CodeSign sign>
[[gnu::always_inline]] inline uint8_t code_of(const DynamicMap& map, float x, float scale) {
  const auto y = std::bit_cast<int32_t>(x / scale);
  const int32_t magnitude = y & 0x7fffffff;
  // Never past the table, whatever x and scale are.
  int32_t bin = magnitude >> 16;
  bin = bin > DynamicMap::kFirstBin ? bin : DynamicMap::kFirstBin;
  bin = bin < DynamicMap::kLastBin ? bin : DynamicMap::kLastBin;
  const int32_t entry = (map.bins[bin - DynamicMap::kFirstBin] + (magnitude & 0xffff)) >> 16;
  if constexpr (sign == CodeSign::positive) {
    return static_cast<uint8_t>(std::bit_cast<int32_t>(x) > 0 ? entry : 0);
  } else {
    const int32_t negative = y >> 31;  // -1 or 0
    const int32_t most = 128 + negative;
    const int32_t near = entry < most ? entry : most;
    return static_cast<uint8_t>(127 + ((near ^ negative) - negative));
  }
}

// Writes the codes and returns the scale; `largest` is the maximum of magnitude_bits over the
// values.
template <CodeSign sign>
[[gnu::always_inline]] inline float encode_block(const DynamicMap& map, const float* values,
                                                 int32_t largest, uint8_t* codes, int64_t n) {
  constexpr int32_t infinity = 0x7f800000;
  if (largest == 0 || largest >= infinity) {
    for (int64_t i = 0; i < n; ++i) codes[i] = zero_code(sign);
    return largest == 0 ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  const auto scale = std::bit_cast<float>(largest);
  // In memory of their own: for all that the compiler knows, codes might overwrite the map.
  uint8_t found[kCodeBlock];
  for (int64_t i = 0; i < n; ++i) found[i] = code_of<sign>(map, values[i], scale);
  std::memcpy(codes, found, static_cast<size_t>(n));
  return scale;
}

}  // namespace blockwise8

}  // namespace dovetail

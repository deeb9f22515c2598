#include "dovetail/numerics/blockwise8.h"

#include <algorithm>
#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

// Number of the entry nearest to a magnitude between 0 and 1, counted from that of 0; by search. A
// sum of two entries and twice a value are exact in double.
constexpr int nearest_entry(std::span<const float> entries, double magnitude) {
  int k = 0;
  while (k + 1 < static_cast<int>(entries.size()) &&
         2 * magnitude >= static_cast<double>(entries[k]) + static_cast<double>(entries[k + 1]))
    ++k;
  return k;
}

constexpr std::span<const float> magnitudes(const std::array<float, 256>& values, CodeSign sign) {
  return std::span(values).subspan(zero_code(sign));
}

constexpr std::array<float, 256> make_values(CodeSign sign) {
  std::array<float, 256> values{};
  int64_t parts = sign == CodeSign::with_sign ? 1 : 2,
          below = 1'000'000;  // of the decade; 10^(6-i)
  const int zero = zero_code(sign);
  int k = 0;
  for (int decade = 0; decade < 7; ++decade, parts *= 2, below /= 10)
    for (int64_t j = 0; j < parts; ++j) {
      ++k;
      const auto middle = static_cast<float>(static_cast<double>(2 * parts + 18 * j + 9) /
                                             static_cast<double>(20 * parts * below));
      values[zero + k] = middle;
      if (sign == CodeSign::with_sign) values[zero - k] = -middle;
    }
  values[zero + k + 1] = 1;
  return values;
}

// The first magnitude that belongs to the entry after `entry`, as bits.
constexpr int32_t start_of_next(std::span<const float> entries, int entry) {
  const double midpoint =
      (static_cast<double>(entries[entry]) + static_cast<double>(entries[entry + 1])) / 2;
  const auto rounded = static_cast<float>(midpoint);
  return std::bit_cast<int32_t>(rounded) + (static_cast<double>(rounded) < midpoint ? 1 : 0);
}

constexpr DynamicMap make_map(CodeSign sign) {
  DynamicMap map{.values = make_values(sign), .bins = {}};
  const std::span<const float> entries = magnitudes(map.values, sign);
  int entry = nearest_entry(entries, std::bit_cast<float>(DynamicMap::kFirstBin << 16));
  const int last = static_cast<int>(entries.size()) - 1;
  for (int32_t bin = 0; bin < static_cast<int32_t>(map.bins.size()); ++bin) {
    const int32_t start = (DynamicMap::kFirstBin + bin) << 16;
    while (entry < last && start_of_next(entries, entry) <= start) ++entry;
    map.bins[bin] = entry << 16;
    if (entry == last) continue;
    const int32_t next = start_of_next(entries, entry) - start;
    if (next < 0x10000) map.bins[bin] += 0x10000 - next;
  }
  return map;
}

constexpr DynamicMap kWithSign = make_map(CodeSign::with_sign),
                     kPositive = make_map(CodeSign::positive);

// What code_of relies on: no bin holds two midpoints, and none lies in the first bin or, but for
// the guard of the unsigned code, below it.
constexpr bool bins_hold(const DynamicMap& map, CodeSign sign) {
  const std::span<const float> entries = magnitudes(map.values, sign);
  for (int k = 0; k + 2 < static_cast<int>(entries.size()); ++k)
    if (start_of_next(entries, k) >> 16 == start_of_next(entries, k + 1) >> 16) return false;
  const int first = sign == CodeSign::with_sign ? 0 : 1;
  return map.bins.front() == first << 16 &&
         map.bins.back() == (static_cast<int>(entries.size()) - 1) << 16;
}
static_assert(bins_hold(kWithSign, CodeSign::with_sign) &&
              bins_hold(kPositive, CodeSign::positive));

DT_VECTOR_CLONES int32_t largest_magnitude(const float* __restrict values, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t bits = blockwise8::magnitude_bits(values[i]);
    largest = largest > bits ? largest : bits;
  }
  return largest;
}

DT_VECTOR_CLONES float encode_with_sign(const DynamicMap& map, const float* values, int32_t largest,
                                        uint8_t* codes, int64_t n) {
  return blockwise8::encode_block<CodeSign::with_sign>(map, values, largest, codes, n);
}

DT_VECTOR_CLONES float encode_positive(const DynamicMap& map, const float* values, int32_t largest,
                                       uint8_t* codes, int64_t n) {
  return blockwise8::encode_block<CodeSign::positive>(map, values, largest, codes, n);
}

DT_VECTOR_CLONES void decode(const DynamicMap& __restrict map, const uint8_t* __restrict codes,
                             float scale, float* __restrict values, int64_t n) {
  // Compilers gather with offsets of the elements' width only.
  int32_t entries[kCodeBlock];
  for (int64_t i = 0; i < n; ++i) entries[i] = codes[i];
  for (int64_t i = 0; i < n; ++i) values[i] = map.values[entries[i]] * scale;
}

void check_sizes(size_t values, size_t codes, size_t scales, const char* what) {
  DT_CHECK_EQ(codes, values, "{}: codes and values", what);
  DT_CHECK_EQ(static_cast<int64_t>(scales), ceil_div(static_cast<int64_t>(values), kCodeBlock),
              "{}: scales and blocks", what);
}

// Calls block(begin, size) for each block of n values.
template <class Block>
void each_block(size_t n, Block&& block) {
  for (size_t begin = 0; begin < n; begin += kCodeBlock)
    block(begin, std::min<size_t>(kCodeBlock, n - begin));
}

uint8_t code_by_search(CodeSign sign, float x, float scale) {
  const float y = x / scale;
  const std::span<const float> entries = magnitudes(dynamic_map(sign).values, sign);
  const int entry = nearest_entry(entries, std::abs(y));
  if (sign == CodeSign::positive) return static_cast<uint8_t>(x > 0 ? std::max(1, entry) : 0);
  return static_cast<uint8_t>(std::signbit(y) ? 127 - std::min(127, entry) : 127 + entry);
}

}  // namespace

const DynamicMap& dynamic_map(CodeSign sign) {
  return sign == CodeSign::with_sign ? kWithSign : kPositive;
}

void encode_blockwise8(CodeSign sign, std::span<const float> values, std::span<uint8_t> codes,
                       std::span<float> scales) {
  check_sizes(values.size(), codes.size(), scales.size(), "encode_blockwise8");
  const auto encode = sign == CodeSign::with_sign ? encode_with_sign : encode_positive;
  const DynamicMap& map = dynamic_map(sign);
  each_block(values.size(), [&](size_t begin, size_t n) {
    const float* from = values.data() + begin;
    scales[begin / kCodeBlock] =
        encode(map, from, largest_magnitude(from, n), codes.data() + begin, n);
  });
}

void decode_blockwise8(CodeSign sign, std::span<const uint8_t> codes, std::span<const float> scales,
                       std::span<float> values) {
  check_sizes(values.size(), codes.size(), scales.size(), "decode_blockwise8");
  const DynamicMap& map = dynamic_map(sign);
  each_block(values.size(), [&](size_t begin, size_t n) {
    decode(map, codes.data() + begin, scales[begin / kCodeBlock], values.data() + begin, n);
  });
}

void encode_blockwise8_reference(CodeSign sign, std::span<const float> values,
                                 std::span<uint8_t> codes, std::span<float> scales) {
  check_sizes(values.size(), codes.size(), scales.size(), "encode_blockwise8_reference");
  each_block(values.size(), [&](size_t begin, size_t n) {
    float scale = 0;
    bool finite = true;
    for (float x : values.subspan(begin, n)) {
      scale = std::max(scale, std::abs(x));
      finite = finite && std::isfinite(x);
    }
    if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
    scales[begin / kCodeBlock] = scale;
    for (size_t i = begin; i < begin + n; ++i)
      codes[i] = finite && scale > 0 ? code_by_search(sign, values[i], scale) : zero_code(sign);
  });
}

void decode_blockwise8_reference(CodeSign sign, std::span<const uint8_t> codes,
                                 std::span<const float> scales, std::span<float> values) {
  check_sizes(values.size(), codes.size(), scales.size(), "decode_blockwise8_reference");
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = dynamic_map(sign).values[codes[i]] * scales[i / kCodeBlock];
}

}  // namespace dovetail

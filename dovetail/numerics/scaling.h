// Magnitudes, scaled copies and sums of squares: the same bits wherever values lie and however wide
// the vectors are.
#pragma once

#include <cstdint>

namespace dovetail {

inline constexpr uint32_t kInfinityBits = 0x7f800000u;

// Bits of the largest |x * scale|, which order as the numbers do; 0 for no values, from
// kInfinityBits on when one is not finite.
uint32_t largest_magnitude_bits(const float* x, float scale, int64_t n);

// out = (x * scale) * factor, the second product in fp64. In place as well.
void scale_into(const float* x, float scale, double factor, int64_t n, float* out);

// In fp64, dealt to 16 lanes.
double sum_of_squares(const float* x, int64_t n);

}  // namespace dovetail

#include "dovetail/numerics/scaling.h"

#include <bit>

#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr int64_t kLanes = 16;

DT_VECTOR_CLONES void add_squares(const float* x, int64_t n, double* __restrict lanes) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) {
      const double v = x[i + j];
      lanes[j] += v * v;
    }
  for (int64_t j = 0; i + j < n; ++j) {
    const double v = x[i + j];
    lanes[j] += v * v;
  }
}

}  // namespace

DT_VECTOR_CLONES uint32_t largest_magnitude_bits(const float* x, float scale, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[i] * scale) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most;
}

DT_VECTOR_CLONES void scale_into(const float* x, float scale, double factor, int64_t n,
                                 float* out) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = static_cast<float>(static_cast<double>(x[i] * scale) * factor);
}

double sum_of_squares(const float* x, int64_t n) {
  double lanes[kLanes] = {}, sum = 0;
  add_squares(x, n, lanes);
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace dovetail

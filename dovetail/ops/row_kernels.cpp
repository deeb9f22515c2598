#include "dovetail/ops/row_kernels.h"

#include <bit>
#include <cmath>
#include <limits>

#include "dovetail/numerics/vector_clones.h"

namespace dovetail::ops::rows {
namespace {

constexpr int kLanes = 16;

#define DT_INLINE inline __attribute__((always_inline))

DT_INLINE float fold(float* lanes) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

// Sum of term(i) over i in [0, n).
template <class F>
DT_INLINE float lane_sum(int64_t n, F&& term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  for (int64_t l = 0; l < n - i; ++l) lanes[l] += term(i + l);
  return fold(lanes);
}

// 2^k * exp(r), |r| <= ln2/2, with the minimax polynomial of Cephes' expf (Moshier). Adding 1.5 *
// 2^23 rounds to integer.
DT_INLINE float exp_f32(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float k = shifted - 12582912.0f;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const uint32_t scale = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return p * std::bit_cast<float>(scale);
}

DT_INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

}  // namespace

DT_VECTOR_CLONES float rms_forward(const float* __restrict x, const float* __restrict w,
                                   float* __restrict y, int64_t n, float eps) {
  const float squares = lane_sum(n, [&](int64_t i) { return x[i] * x[i]; });
  const float r = 1.0f / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * r * w[i];
  return r;
}

DT_VECTOR_CLONES void rms_backward(const float* __restrict g, const float* __restrict x,
                                   const float* __restrict w, float r, float* __restrict dx,
                                   float* __restrict dw, int64_t n) {
  const float dot = lane_sum(n, [&](int64_t i) { return g[i] * w[i] * x[i]; });
  const float c = r * r * r / static_cast<float>(n) * dot;
  for (int64_t i = 0; i < n; ++i) {
    dx[i] = r * (g[i] * w[i]) - x[i] * c;
    dw[i] += g[i] * x[i] * r;
  }
}

DT_VECTOR_CLONES void swiglu_forward(const float* __restrict a, const float* __restrict b,
                                     float* __restrict y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] * sigmoid(a[i]) * b[i];
}

DT_VECTOR_CLONES void swiglu_backward(const float* __restrict g, const float* __restrict a,
                                      const float* __restrict b, float* __restrict da,
                                      float* __restrict db, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float s = sigmoid(a[i]);
    da[i] = g[i] * b[i] * s * (1.0f + a[i] * (1.0f - s));
    db[i] = g[i] * a[i] * s;
  }
}

DT_VECTOR_CLONES void rotate(const float* __restrict x, const float* __restrict cosine,
                             const float* __restrict sine, float direction, float* __restrict y,
                             int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float c = cosine[i], s = direction * sine[i];
    y[i] = x[i] * c - x[i + half] * s;
    y[i + half] = x[i + half] * c + x[i] * s;
  }
}

DT_VECTOR_CLONES float max(const float* __restrict x, int64_t n) {
  float lanes[kLanes];
  for (float& l : lanes) l = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] = lanes[l] > x[i + l] ? lanes[l] : x[i + l];
  for (int64_t l = 0; l < n - i; ++l) lanes[l] = lanes[l] > x[i + l] ? lanes[l] : x[i + l];
  float best = lanes[0];
  for (int l = 1; l < kLanes; ++l) best = best > lanes[l] ? best : lanes[l];
  return best;
}

DT_VECTOR_CLONES float sum_exp(const float* __restrict x, float shift, int64_t n) {
  return lane_sum(n, [&](int64_t i) { return exp_f32(x[i] - shift); });
}

DT_VECTOR_CLONES void scaled_exp(const float* x, float shift, float scale, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_f32(x[i] - shift) * scale;
}

DT_VECTOR_CLONES void accumulate(const float* __restrict x, float* __restrict sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i];
}

}  // namespace dovetail::ops::rows

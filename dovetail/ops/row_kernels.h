// The inner loops of the fused operations, on fp32 rows of n elements. Sums run in 16 fixed lanes
// that are folded as a tree, so a result depends on the row alone, not on the machine's vector
// width. exp is accurate to 2 ulp between -87 and 88 and clamped outside (softmax and sigmoid lose
// nothing); NaN stays NaN.
#pragma once

#include <cstdint>

namespace dovetail::ops::rows {

// y = x * r * w with r = 1 / sqrt(mean(x^2) + eps). Returns r.
float rms_forward(const float* x, const float* w, float* y, int64_t n, float eps);
// dx = r * (g*w) - x * r^3/n * sum(g*w*x);  dw += g * x * r.
void rms_backward(const float* g, const float* x, const float* w, float r, float* dx, float* dw,
                  int64_t n);

// y = silu(a) * b, silu(a) = a * sigmoid(a).
void swiglu_forward(const float* a, const float* b, float* y, int64_t n);
// da = g * b * s * (1 + a * (1 - s)) with s = sigmoid(a);  db = g * a * s.
void swiglu_backward(const float* g, const float* a, const float* b, float* da, float* db,
                     int64_t n);

// The pairs (x[i], x[i + half]) turned by the angles whose cosines and sines are given; `direction`
// is 1 or -1.
void rotate(const float* x, const float* cosine, const float* sine, float direction, float* y,
            int64_t half);

float max(const float* x, int64_t n);  // -infinity for n = 0
// sum of exp(x - shift)
float sum_exp(const float* x, float shift, int64_t n);
// y = exp(x - shift) * scale; x and y may be the same.
void scaled_exp(const float* x, float shift, float scale, float* y, int64_t n);

// sum += x
void accumulate(const float* x, float* sum, int64_t n);

}  // namespace dovetail::ops::rows

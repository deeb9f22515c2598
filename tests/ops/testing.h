// Shared by the tests of ops: comparisons and a sink that behaves as the engine's does.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/ops/gradient_sink.h"

namespace dovetail::ops::testing {

// Largest difference, relative to the largest magnitude of `want`.
inline double difference(const at::Tensor& got, const at::Tensor& want) {
  if (want.numel() == 0) return 0;
  const at::Tensor w = want.detach().to(at::kDouble), g = got.detach().to(at::kDouble);
  return ((g - w).abs().max() / w.abs().max().clamp_min(1e-30)).item<double>();
}

inline void expect_close(const at::Tensor& got, const at::Tensor& want, double bound,
                         const std::string& what = "") {
  ASSERT_TRUE(got.defined()) << what;
  ASSERT_EQ(got.sizes(), want.sizes()) << what;
  EXPECT_FALSE(got.isnan().any().item<bool>()) << what;
  EXPECT_LE(difference(got, want), bound) << what;
}

// One rounding of a sum, in each type.
inline double bound_of(at::ScalarType type) { return type == at::kBFloat16 ? 1.0 / 128 : 2e-5; }

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing of the wanted type was thrown";
  return {};
}

// Counts requests; the first finds rubbish, or zeros where few rows are written, later ones an earlier contribution.
class FlatSink : public GradientSink {
 public:
  explicit FlatSink(at::Tensor view) : view(std::move(view)) { this->view.fill_(NAN); }
  std::optional<Target> next_contribution(bool few_rows) override {
    if (closed) return std::nullopt;
    const bool first = requests++ == 0;
    if (first && few_rows) view.zero_();
    return Target{view, first && !few_rows};
  }
  at::Tensor view;
  int requests = 0;
  bool closed = false;
};

}  // namespace dovetail::ops::testing

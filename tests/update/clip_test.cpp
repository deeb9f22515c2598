#include "dovetail/update/clip.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <random>

#include "dovetail/base/error.h"
#include "tests/update/reference.h"

namespace dovetail {
namespace {

// Deals fragments of the values to so many holders and serializes their sums.
std::vector<std::byte> partials(const std::vector<float>& values, size_t holders, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<ReproducibleSum> sums(holders);
  for (size_t at = 0; at < values.size();) {
    const size_t n = std::min(values.size() - at, 1 + random() % 500);
    sums[random() % holders].add(std::span(values).subspan(at, n));
    at += n;
  }
  std::vector<std::byte> bytes;
  for (const ReproducibleSum& s : sums) {
    const auto b = s.to_bytes();
    bytes.insert(bytes.end(), b.begin(), b.end());
  }
  return bytes;
}

TEST(Clip, AgreesWithTorch) {
  const auto values = random_values(10000, 1, 0.3f);
  for (double max_norm : {0.5, 1.0, 20.0, 1000.0})
    for (double scale : {1.0, 0.125, 1.0 / 3})
      for (NormKind kind : {NormKind::two, NormKind::infinity}) {
        torch::Tensor parameter = torch::zeros({10000}, torch::kFloat64).requires_grad_(true);
        parameter.mutable_grad() = to_torch(values).to(torch::kFloat64) * scale;
        const double p = kind == NormKind::two ? 2.0 : std::numeric_limits<double>::infinity();
        const double norm =
            torch::nn::utils::clip_grad_norm_(std::vector<torch::Tensor>{parameter}, max_norm, p);
        const ClipResult r = clip_by_global_norm(partials(values, 3, 9), {kind, max_norm}, scale);
        EXPECT_TRUE(r.finite);
        EXPECT_EQ(r.elements, 10000);
        EXPECT_NEAR(r.norm, norm, 1e-12 * norm);
        const torch::Tensor ours =
            to_torch(values).to(torch::kFloat64) * static_cast<double>(r.grad_scale);
        EXPECT_LT((ours - parameter.grad()).norm().item<double>(),
                  1e-7 * parameter.grad().norm().item<double>());
      }
}

TEST(Clip, HoldersAndOrderDoNotShow) {
  const auto values = random_values(20000, 4, 1e-4f);
  const ClipResult one = clip_by_global_norm(partials(values, 1, 0), {NormKind::two, 1e-3}, 0.5);
  for (size_t holders : {2u, 3u, 8u, 64u}) {
    const ClipResult many =
        clip_by_global_norm(partials(values, holders, holders), {NormKind::two, 1e-3}, 0.5);
    EXPECT_EQ(many.norm, one.norm);
    EXPECT_EQ(many.grad_scale, one.grad_scale);
    EXPECT_EQ(many.elements, one.elements);
  }
}

TEST(Clip, ScaleMeetsTheGradientsOnce) {
  const std::vector<float> values = {3, 4};
  const ClipResult r = clip_by_global_norm(partials(values, 1, 0), {NormKind::two, 1}, 0.5);
  EXPECT_DOUBLE_EQ(r.norm, 2.5);
  EXPECT_FLOAT_EQ(r.coefficient, 1 / 2.500001f);
  EXPECT_FLOAT_EQ(r.grad_scale, 0.5f / 2.500001f);
  EXPECT_NEAR(5 * r.grad_scale, 1, 1e-6);  // what is left has the norm asked for
  const ClipResult negative = clip_by_global_norm(partials(values, 1, 0), {NormKind::two, 1}, -0.5);
  EXPECT_DOUBLE_EQ(negative.norm, 2.5);
  EXPECT_EQ(negative.grad_scale, -r.grad_scale);
}

TEST(Clip, NeverScalesUpAndMeasuresWithoutLimit) {
  const std::vector<float> values = {3, 4};
  const ClipResult below = clip_by_global_norm(partials(values, 1, 0), {NormKind::two, 6}, 1);
  EXPECT_EQ(below.coefficient, 1);
  const ClipResult open = clip_by_global_norm(partials(values, 2, 0), {}, 2);
  EXPECT_EQ(open.norm, 10);
  EXPECT_EQ(open.coefficient, 1);
  EXPECT_EQ(open.grad_scale, 2);
  const ClipResult zero =
      clip_by_global_norm(partials(std::vector<float>(5), 2, 0), {NormKind::two, 1}, 1);
  EXPECT_EQ(zero.norm, 0);
  EXPECT_EQ(zero.coefficient, 1);
}

TEST(Clip, ReportsNonFiniteNorms) {
  for (NormKind kind : {NormKind::two, NormKind::infinity})
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      auto values = random_values(3000, 4, 1);
      values[1234] = bad;
      const ClipResult r = clip_by_global_norm(partials(values, 4, 1), {kind, 1}, 1);
      EXPECT_FALSE(r.finite);
      EXPECT_EQ(std::isnan(r.norm), std::isnan(bad));
    }
  const std::vector<float> one = {1};
  EXPECT_FALSE(clip_by_global_norm(partials(one, 1, 0), {NormKind::two, 1}, NAN).finite);
}

// The norm of gradients whose squares leave the range of fp32 is still right.
TEST(Clip, LargeGradientsAreNoInfinity) {
  const std::vector<float> values(4, 1e30f);
  const ClipResult r = clip_by_global_norm(partials(values, 2, 0), {NormKind::two, 1}, 1);
  EXPECT_TRUE(r.finite);
  EXPECT_NEAR(r.norm, 2e30, 1e23);
  EXPECT_GT(r.grad_scale, 0);
}

TEST(Clip, RefusesBadInput) {
  const std::vector<float> values = {1};
  auto bytes = partials(values, 1, 0);
  EXPECT_THROW(clip_by_global_norm(bytes, {NormKind::two, 0}, 1), ConfigError);
  EXPECT_THROW(clip_by_global_norm(bytes, {NormKind::two, -1}, 1), ConfigError);
  EXPECT_THROW(clip_by_global_norm(bytes, {NormKind::two, NAN}, 1), ConfigError);
  EXPECT_THROW(clip_by_global_norm({}, {}, 1), InvariantError);
  bytes.pop_back();
  EXPECT_THROW(clip_by_global_norm(bytes, {}, 1), InvariantError);
}

}  // namespace
}  // namespace dovetail

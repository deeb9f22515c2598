#include "dovetail/numerics/reproducible_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Exact sum by Shewchuk's non-overlapping expansions, rounded once to nearest even: an unrelated
// method.
double exact_sum_of_squares(const std::vector<float>& values) {
  std::vector<double> parts;
  for (float g : values) {
    double x = static_cast<double>(g) * g;
    size_t kept = 0;
    for (double y : parts) {
      if (std::abs(x) < std::abs(y)) std::swap(x, y);
      const double high = x + y;
      const double low = y - (high - x);
      if (low != 0) parts[kept++] = low;
      x = high;
    }
    parts.resize(kept);
    parts.push_back(x);
  }
  if (parts.empty()) return 0;
  double high = parts.back(), low = 0;
  parts.pop_back();
  while (!parts.empty() && low == 0) {
    const double x = high, y = parts.back();
    parts.pop_back();
    high = x + y;
    low = y - (high - x);
  }
  // A tie that lower parts break.
  if (!parts.empty() && ((low < 0) == (parts.back() < 0)) && low != 0 && parts.back() != 0) {
    const double twice = low * 2, x = high + twice;
    if (twice == x - high) high = x;
  }
  return high;
}

ReproducibleSum sum_of(std::span<const float> values) {
  ReproducibleSum sum;
  sum.add(values);
  return sum;
}

std::vector<float> gaussian(size_t n, float scale, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(n);
  for (float& v : values) v = normal(random);
  return values;
}

// Any finite bit pattern: all exponents, denormals included.
std::vector<float> any_finite(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> values(n);
  for (float& v : values) do
      v = std::bit_cast<float>(static_cast<uint32_t>(random()));
    while (!std::isfinite(v));
  return values;
}

void expect_exact(const std::vector<float>& values) {
  const ReproducibleSum sum = sum_of(values);
  EXPECT_EQ(sum.result(), exact_sum_of_squares(values));
  float largest = 0;
  for (float v : values) largest = std::max(largest, std::abs(v));
  EXPECT_EQ(sum.max_abs(), largest);
  EXPECT_EQ(sum.count(), static_cast<int64_t>(values.size()));
}

TEST(ReproducibleSum, NothingIsZero) {
  EXPECT_EQ(ReproducibleSum{}.result(), 0.0);
  EXPECT_EQ(ReproducibleSum{}.max_abs(), 0.0f);
  EXPECT_EQ(sum_of(std::vector<float>(100, -0.0f)).result(), 0.0);
}

TEST(ReproducibleSum, IsTheExactSumRoundedOnce) {
  for (size_t n : {1u, 2u, 15u, 16u, 17u, 2047u, 2048u, 2049u, 100003u}) {
    expect_exact(gaussian(n, 1e-3f, n));
    expect_exact(gaussian(n, 3e18f, n + 1));
    expect_exact(any_finite(n, n + 2));
  }
}

TEST(ReproducibleSum, QuadAgreesWithinItsOwnError) {
  const std::vector<float> values = gaussian(1 << 20, 0.02f, 7);
  __float128 quad = 0;
  for (float g : values) quad += static_cast<__float128>(g) * g;
  EXPECT_EQ(sum_of(values).result(), static_cast<double>(quad));
}

TEST(ReproducibleSum, Ends) {
  const float denormal = std::numeric_limits<float>::denorm_min(),
              largest = std::numeric_limits<float>::max();
  EXPECT_EQ(sum_of(std::vector<float>{denormal}).result(), 0x1p-298);
  EXPECT_EQ(sum_of(std::vector<float>(3, denormal)).result(), 3 * 0x1p-298);
  expect_exact(std::vector<float>(5000, largest));
  std::vector<float> both(4096, denormal);
  both[77] = largest;
  expect_exact(both);
  both.push_back(1.0f);
  expect_exact(both);
  // Far below the last bit of the result, a single value still decides a tie: 2^27+1 squared has 55
  // bits.
  expect_exact({0x1p26f, 1.0f, 0x1p-1f, 0x1p-1f});
  expect_exact({0x1p26f, 0x1p-1f, 0x1p-1f, denormal});
}

// Every value alone in its chunk's shadow: one large value per chunk, others of every exponent
// below.
TEST(ReproducibleSum, SmallValuesBesideLargeOnesAreKept) {
  for (int exponent = -149; exponent <= 127; exponent += 3) {
    std::vector<float> values(300, std::ldexp(1.0f, exponent));
    values.push_back(std::ldexp(1.75f, 100));
    values.push_back(std::ldexp(0x1.fffffep0f, std::max(exponent, -126)));
    expect_exact(values);
  }
}

TEST(ReproducibleSum, SplitsAndOrdersDoNotShow) {
  std::mt19937_64 random(3);
  for (auto values : {gaussian(50000, 0.1f, 1), any_finite(50000, 2)}) {
    const auto whole = sum_of(values).to_bytes();
    for (int round = 0; round < 30; ++round) {
      if (round % 3 == 2) std::shuffle(values.begin(), values.end(), random);
      std::vector<ReproducibleSum> ranks(1 + random() % 9);
      const size_t longest = round % 2 ? 40 : 9000;
      for (size_t at = 0; at < values.size();) {
        const size_t n = std::min(values.size() - at, 1 + random() % longest);
        ranks[random() % ranks.size()].add(std::span(values).subspan(at, n));
        at += n;
      }
      ReproducibleSum total;
      for (const ReproducibleSum& r : ranks) total.merge(ReproducibleSum::from_bytes(r.to_bytes()));
      ASSERT_EQ(total.to_bytes(), whole) << round;
    }
  }
}

TEST(ReproducibleSum, NanAndInfinitySurviveMergingInAnyOrder) {
  std::vector<float> values = gaussian(10000, 1, 5);
  values[4321] = -kInf;
  const ReproducibleSum infinite = sum_of(values);
  EXPECT_EQ(infinite.result(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(infinite.max_abs(), kInf);
  values[17] = -kNan;
  const ReproducibleSum nan = sum_of(values);
  EXPECT_TRUE(std::isnan(nan.result()));
  EXPECT_TRUE(std::isnan(nan.max_abs()));

  const ReproducibleSum finite = sum_of(gaussian(10000, 1, 6));
  for (const auto& order :
       {std::array{finite, infinite, nan}, {nan, infinite, finite}, {infinite, nan, finite}}) {
    ReproducibleSum total;
    for (const auto& part : order) total.merge(part);
    EXPECT_TRUE(std::isnan(total.result()));
    EXPECT_EQ(total.count(), 30000);
  }
  ReproducibleSum left = finite, right = infinite;
  left.merge(infinite);
  right.merge(finite);
  EXPECT_EQ(left.to_bytes(), right.to_bytes());
  EXPECT_EQ(left.result(), std::numeric_limits<double>::infinity());

  // Values after a NaN do not show either, whatever its payload.
  ReproducibleSum other_nan = sum_of(std::vector<float>{std::bit_cast<float>(0xff800001u), 1.0f});
  EXPECT_EQ(other_nan.to_bytes(), sum_of(std::vector<float>{2.0f, kNan}).to_bytes());
}

TEST(ReproducibleSum, DamagedBytesAreRefused) {
  auto bytes = sum_of(std::vector<float>{1, 2}).to_bytes();
  EXPECT_EQ(ReproducibleSum::from_bytes(bytes), sum_of(std::vector<float>{2, 1}));
  bytes[95] = std::byte{1};
  EXPECT_THROW(ReproducibleSum::from_bytes(bytes), CommError);
  bytes[95] = std::byte{0};
  bytes[91] = std::byte{0x80};
  EXPECT_THROW(ReproducibleSum::from_bytes(bytes), CommError);
}

}  // namespace
}  // namespace dovetail

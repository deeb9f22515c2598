#include "dovetail/numerics/blockwise8.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr CodeSign kBoth[] = {CodeSign::with_sign, CodeSign::positive};

struct Encoded {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

using Encode = void(CodeSign, std::span<const float>, std::span<uint8_t>, std::span<float>);

Encoded encode(CodeSign sign, const std::vector<float>& values, Encode* with = encode_blockwise8) {
  Encoded e{std::vector<uint8_t>(values.size(), 77),
            std::vector<float>(ceil_div(std::ssize(values), kCodeBlock), -1)};
  with(sign, values, e.codes, e.scales);
  return e;
}

std::vector<float> decode(CodeSign sign, const Encoded& e) {
  std::vector<float> values(e.codes.size(), -1);
  decode_blockwise8(sign, e.codes, e.scales, values);
  return values;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The definition by exhaustion, in double: the nearest of all 256 entries to the quotient, the
// larger magnitude of two equally near.
uint8_t by_definition(CodeSign sign, float x, float scale) {
  const double y = x / scale;
  int best = zero_code(sign);
  for (int c = 0; c < 256; ++c) {
    const double entry = dynamic_map(sign).values[c], chosen = dynamic_map(sign).values[best];
    const double gain = std::abs(chosen - y) - std::abs(entry - y);
    if (gain > 0 || (gain == 0 && std::abs(entry) > std::abs(chosen))) best = c;
  }
  if (sign == CodeSign::positive && x > 0) best = std::max(best, 1);
  return static_cast<uint8_t>(best);
}

float next_up(float x) { return std::nextafter(x, kInf); }
float next_down(float x) { return std::nextafter(x, -kInf); }

// Values between -1 and 1 (or 0 and 1) that decide: entries, midpoints, edges of bins, and the
// floats around each.
std::vector<float> deciding_values(CodeSign sign) {
  std::vector<float> values;
  const auto add = [&](float x) {
    for (float y : {next_down(x), x, next_up(x)})
      if (std::abs(y) <= 1 && (y >= 0 || sign == CodeSign::with_sign)) values.push_back(y);
  };
  const auto& entries = dynamic_map(sign).values;
  for (int c = 0; c < 256; ++c) {
    add(entries[c]);
    if (c < 255)
      add(static_cast<float>(
          (static_cast<double>(entries[c]) + static_cast<double>(entries[c + 1])) / 2));
  }
  for (uint32_t high = 0; high <= 0x3f80; ++high)
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0xffffu}) {
      const auto x = std::bit_cast<float>(high << 16 | low);
      if (x > 1) continue;
      values.push_back(x);
      if (sign == CodeSign::with_sign) values.push_back(-x);
    }
  return values;
}

// The values in blocks whose scale is 1: each block starts with a 1.
std::vector<float> in_unit_blocks(const std::vector<float>& values) {
  std::vector<float> blocks;
  for (float x : values) {
    if (blocks.size() % kCodeBlock == 0) blocks.push_back(1);
    blocks.push_back(x);
  }
  return blocks;
}

TEST(Blockwise8, MapsAreThePublishedOnes) {
  for (CodeSign sign : kBoth) {
    const auto& map = dynamic_map(sign).values;
    std::vector<double> wanted = {0, 1};
    for (int decade = 0; decade < 7; ++decade) {
      // linspace(0.1, 1, n + 1), means of neighbours, times 10^(decade-6).
      const int n = sign == CodeSign::with_sign ? 1 << decade : 2 << decade;
      for (int j = 0; j < n; ++j) {
        const double low = 0.1 + 0.9 * j / n, high = 0.1 + 0.9 * (j + 1) / n;
        wanted.push_back((low + high) / 2 * std::pow(10.0, decade - 6));
        if (sign == CodeSign::with_sign) wanted.push_back(-wanted.back());
      }
    }
    std::sort(wanted.begin(), wanted.end());
    ASSERT_EQ(wanted.size(), 256u);
    for (int c = 0; c < 256; ++c) EXPECT_NEAR(map[c], wanted[c], 6e-8 * std::abs(wanted[c])) << c;
  }
}

// As the published construction gives them in fp32 (linspace, means, powers of ten) under
// torch 2.13, to six digits.
TEST(Blockwise8, MapsHaveTheNumbersOfTheirSource) {
  const auto& with_sign = dynamic_map(CodeSign::with_sign).values;
  const auto& positive = dynamic_map(CodeSign::positive).values;
  const auto near = [](float got, double wanted) {
    EXPECT_NEAR(got, wanted, 1e-5 * std::abs(wanted));
  };
  near(with_sign[0], -0.992969);
  near(with_sign[1], -0.978906);
  near(with_sign[126], -5.5e-7);
  near(with_sign[128], 5.5e-7);
  near(with_sign[129], 3.25e-6);
  near(positive[1], 3.25e-7);
  near(positive[2], 7.75e-7);
  near(positive[126], 0.0992969);
  near(positive[127], 0.103516);
  near(positive[254], 0.996484);
  EXPECT_EQ(with_sign[255], 1);
  EXPECT_EQ(positive[255], 1);
}

TEST(Blockwise8, MapsAreOrderedAndHoldTheirZero) {
  for (CodeSign sign : kBoth) {
    const auto& map = dynamic_map(sign).values;
    for (int c = 0; c + 1 < 256; ++c) EXPECT_LT(map[c], map[c + 1]) << c;
    EXPECT_EQ(std::bit_cast<uint32_t>(map[zero_code(sign)]), 0u);
  }
  const auto& map = dynamic_map(CodeSign::with_sign).values;
  for (int k = 1; k <= 127; ++k) EXPECT_EQ(map[127 - k], -map[127 + k]) << k;
}

TEST(Blockwise8, EntriesComeBackAsThemselves) {
  for (CodeSign sign : kBoth) {
    const auto& map = dynamic_map(sign).values;
    const std::vector<float> values(map.begin(), map.end());  // one block with scale 1
    const Encoded e = encode(sign, values);
    EXPECT_EQ(e.scales, std::vector<float>{1});
    for (int c = 0; c < 256; ++c) EXPECT_EQ(e.codes[c], c);
    EXPECT_TRUE(same_bits(decode(sign, e), values));
  }
}

TEST(Blockwise8, RoundsToTheNearestEntryByExactComparison) {
  for (CodeSign sign : kBoth) {
    const std::vector<float> values = in_unit_blocks(deciding_values(sign));
    const Encoded fast = encode(sign, values),
                  slow = encode(sign, values, encode_blockwise8_reference);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(fast.codes[i], by_definition(sign, values[i], 1)) << std::hexfloat << values[i];
      ASSERT_EQ(slow.codes[i], fast.codes[i]) << std::hexfloat << values[i];
    }
  }
}

// Of the pairs of neighbours whose midpoint is an fp32 number.
TEST(Blockwise8, TiesGoToTheLargerMagnitude) {
  for (CodeSign sign : kBoth) {
    const auto& map = dynamic_map(sign).values;
    int ties = 0;
    for (int c = 0; c < 255; ++c) {
      const double midpoint = (static_cast<double>(map[c]) + static_cast<double>(map[c + 1])) / 2;
      const auto x = static_cast<float>(midpoint);
      if (static_cast<double>(x) != midpoint) continue;
      ++ties;
      const int wanted = std::abs(map[c]) > std::abs(map[c + 1]) ? c : c + 1;
      EXPECT_EQ(encode(sign, {1, x}).codes[1], wanted) << c;
    }
    EXPECT_GT(ties, 50);
  }
}

TEST(Blockwise8, FastAndScalarAgreeForEverySizeAndScale) {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (CodeSign sign : kBoth)
    for (int n :
         {0, 1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 200, 255, 256, 257, 511, 513, 4099}) {
      for (float size : {1.0f, 1e-30f, 1e30f, 3e-39f, 1e-44f, 1e-12f}) {
        std::vector<float> values(n);
        for (float& x : values) {
          // Magnitudes over nine decades.
          x = normal(random) * std::pow(10.0f, -static_cast<float>(random() % 10)) * size;
          if (random() % 13 == 0) x = 0;
          if (sign == CodeSign::positive) x = std::abs(x);
        }
        const Encoded fast = encode(sign, values),
                      slow = encode(sign, values, encode_blockwise8_reference);
        ASSERT_EQ(fast.codes, slow.codes) << n << " of " << size;
        ASSERT_TRUE(same_bits(fast.scales, slow.scales)) << n << " of " << size;
        const std::vector<float> back = decode(sign, fast);
        std::vector<float> slow_back(n);
        decode_blockwise8_reference(sign, slow.codes, slow.scales, slow_back);
        ASSERT_TRUE(same_bits(back, slow_back)) << n << " of " << size;
        for (int i = 0; i < n; ++i)
          ASSERT_EQ(fast.codes[i],
                    fast.scales[i / kCodeBlock] == 0
                        ? zero_code(sign)
                        : by_definition(sign, values[i], fast.scales[i / kCodeBlock]));
      }
    }
}

TEST(Blockwise8, ErrorIsAtMostHalfTheGapOfTheEntries) {
  std::mt19937_64 random(5);
  std::normal_distribution<float> normal;
  std::vector<float> values(256 * 64);
  for (float& x : values) x = normal(random);
  const Encoded e = encode(CodeSign::with_sign, values);
  const std::vector<float> back = decode(CodeSign::with_sign, e);
  double worst = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const float scale = e.scales[i / kCodeBlock];
    // The widest gaps are those above a tenth of the scale: 64 parts of 0.9, half of one is
    // 0.00703125. That is also how far -1 is from the last entry.
    worst = std::max(worst, std::abs(static_cast<double>(back[i]) - values[i]) / scale);
  }
  EXPECT_LT(worst, 0.007032);
  EXPECT_GT(worst, 0.0069);  // so the measure sees something
}

TEST(Blockwise8, BlocksAreIndependent) {
  std::vector<float> values(3 * 256 + 5);
  std::mt19937_64 random(7);
  for (float& x : values) x = static_cast<float>(random() % 1000) / 1000;
  values[300] = 1e20f;
  for (CodeSign sign : kBoth) {
    const Encoded all = encode(sign, values);
    for (size_t b = 0; b < 4; ++b) {
      const std::vector<float> part(values.begin() + b * 256,
                                    values.begin() + std::min(values.size(), b * 256 + 256));
      const Encoded one = encode(sign, part);
      EXPECT_EQ(one.scales[0], all.scales[b]);
      EXPECT_TRUE(std::equal(one.codes.begin(), one.codes.end(), all.codes.begin() + b * 256)) << b;
    }
  }
}

TEST(Blockwise8, ZerosComeBackAsZeros) {
  for (CodeSign sign : kBoth)
    for (float zero : {0.0f, -0.0f}) {
      const Encoded e = encode(sign, std::vector<float>(300, zero));
      EXPECT_TRUE(same_bits(e.scales, {0, 0}));
      EXPECT_EQ(e.codes, std::vector<uint8_t>(300, zero_code(sign)));
      EXPECT_TRUE(same_bits(decode(sign, e), std::vector<float>(300, 0.0f)));
    }
  // A zero among others too.
  const Encoded e = encode(CodeSign::with_sign, {-3, 0, -0.0f, 1});
  EXPECT_EQ(e.codes[1], 127);
  EXPECT_EQ(e.codes[2], 127);
  EXPECT_EQ(decode(CodeSign::with_sign, e)[1], 0);
}

TEST(Blockwise8, WhatIsNotFiniteMakesItsBlockNaN) {
  for (CodeSign sign : kBoth)
    for (float bad :
         {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(),
          -std::numeric_limits<float>::quiet_NaN(), std::bit_cast<float>(0x7f800001u)}) {
      std::vector<float> values(256 * 3, 0.5f);
      values[256 + 200] = bad;
      const Encoded fast = encode(sign, values),
                    slow = encode(sign, values, encode_blockwise8_reference);
      EXPECT_EQ(fast.codes, slow.codes);
      EXPECT_TRUE(same_bits(fast.scales, slow.scales));
      const std::vector<float> back = decode(sign, fast);
      for (size_t i = 0; i < back.size(); ++i) {
        if (i / 256 == 1)
          EXPECT_TRUE(std::isnan(back[i])) << i;
        else
          EXPECT_EQ(back[i], 0.5f) << i;
      }
    }
}

TEST(Blockwise8, DenormalScalesDoNotOverflow) {
  const float least = std::numeric_limits<float>::denorm_min();
  for (CodeSign sign : kBoth) {
    const Encoded e = encode(sign, {least, 0, 2 * least, 3 * least, 100 * least});
    EXPECT_EQ(e.scales[0], 100 * least);
    EXPECT_EQ(e.codes[1], zero_code(sign));
    const std::vector<float> back = decode(sign, e);
    EXPECT_EQ(back[4], 100 * least);
    for (int i = 0; i < 5; ++i) {
      EXPECT_TRUE(std::isfinite(back[i]));
      EXPECT_EQ(e.codes[i],
                by_definition(sign, static_cast<float>(std::vector<int>{1, 0, 2, 3, 100}[i]), 100))
          << i;
    }
    EXPECT_EQ(encode(sign, {least}).codes[0], 255);
    EXPECT_EQ(decode(sign, encode(sign, {least}))[0], least);
  }
}

TEST(Blockwise8, SecondMomentsAboveZeroStayAboveZero) {
  const float least = std::numeric_limits<float>::denorm_min();
  // The last quotients underflow to 0.
  for (float x : {1e-7f, 1e-8f, 1e-20f, 1e-38f, least}) {
    for (Encode* with : {encode_blockwise8, encode_blockwise8_reference}) {
      EXPECT_EQ(encode(CodeSign::positive, {1, x, 0}, with).codes,
                (std::vector<uint8_t>{255, 1, 0}))
          << x;
      EXPECT_EQ(encode(CodeSign::positive, {1e30f, x, -0.0f}, with).codes,
                (std::vector<uint8_t>{255, 1, 0}))
          << x;
    }
  }
  EXPECT_EQ(encode(CodeSign::with_sign, {1, 1e-7f, -1e-7f}).codes,
            (std::vector<uint8_t>{255, 127, 127}));
  // Where there is no guard, it rounds like the map.
  EXPECT_EQ(encode(CodeSign::positive, {1, 5.49e-7f, 5.51e-7f}).codes,
            (std::vector<uint8_t>{255, 1, 2}));
  EXPECT_EQ(encode(CodeSign::positive, {1, -0.5f}).codes, (std::vector<uint8_t>{255, 0}));
}

TEST(Blockwise8, SizesAreChecked) {
  std::vector<float> values(257), scales(2), one(1);
  std::vector<uint8_t> codes(257), few(256);
  EXPECT_NO_THROW(encode_blockwise8(CodeSign::positive, values, codes, scales));
  EXPECT_THROW(encode_blockwise8(CodeSign::positive, values, codes, one), InvariantError);
  EXPECT_THROW(encode_blockwise8(CodeSign::positive, values, few, scales), InvariantError);
  EXPECT_THROW(decode_blockwise8(CodeSign::positive, few, scales, values), InvariantError);
  EXPECT_THROW(decode_blockwise8(CodeSign::positive, codes, one, values), InvariantError);
}

}  // namespace
}  // namespace dovetail

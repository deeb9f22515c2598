#include "dovetail/numerics/bf16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

float f32(uint32_t bits) { return std::bit_cast<float>(bits); }

// Rounding by its definition, with no bit tricks: the nearer neighbour, the even one of two equally
// near.
uint16_t by_definition(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const auto below = static_cast<uint16_t>(u >> 16);  // toward zero
  const auto above = static_cast<uint16_t>(below + 1);
  const double value = std::abs(static_cast<double>(x));
  const double low = std::abs(static_cast<double>(f32_from_bf16(below)));
  // Beyond the largest finite value the next step of the grid counts as infinity.
  const double high =
      (above & 0x7fff) == 0x7f80 ? 0x1p128 : std::abs(static_cast<double>(f32_from_bf16(above)));
  if (value - low < high - value) return below;
  if (value - low > high - value) return above;
  return (below & 1) == 0 ? below : above;
}

// Around every exponent and sign: zero, ties, neighbours of ties, ends of the mantissa.
std::vector<float> interesting() {
  std::vector<float> values;
  for (uint32_t high = 0; high < 0x10000; high += 1)
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      values.push_back(f32(high << 16 | low));
  return values;
}

TEST(Bf16, RoundsToNearestEvenForEveryUpperHalf) {
  for (float x : interesting()) {
    if (std::isnan(x) || std::isinf(x)) continue;
    ASSERT_EQ(bf16_from_f32(x), by_definition(x)) << std::hexfloat << x;
  }
}

TEST(Bf16, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(bf16_from_f32(inf), 0x7f80);
  EXPECT_EQ(bf16_from_f32(-inf), 0xff80);
  EXPECT_EQ(bf16_from_f32(-0.0f), 0x8000);
  EXPECT_EQ(bf16_from_f32(f32(0x7f7f7fff)), 0x7f7f);  // last value that stays finite
  EXPECT_EQ(bf16_from_f32(f32(0x7f7f8000)), 0x7f80);
  EXPECT_EQ(bf16_from_f32(f32(0x00008000)), 0x0000);  // denormal tie, to even
  EXPECT_EQ(bf16_from_f32(f32(0x00018000)), 0x0002);
  for (uint32_t nan :
       {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu, 0x7fc00000u, 0x7f808000u}) {
    EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(f32(nan))))) << std::hex << nan;
    EXPECT_EQ(bf16_from_f32(f32(nan)) >> 15, nan >> 31) << std::hex << nan;
  }
}

TEST(Bf16, DecodeIsExactAndEncodeUndoesIt) {
  for (uint32_t b = 0; b < 0x10000; ++b) {
    const float x = f32_from_bf16(static_cast<uint16_t>(b));
    EXPECT_EQ(std::bit_cast<uint32_t>(x), b << 16);
    if (!std::isnan(x)) {
      ASSERT_EQ(bf16_from_f32(x), b);
    }
  }
}

TEST(Bf16, SpansGiveTheBitsOfTheScalarAtEveryLengthAndOffset) {
  const std::vector<float> values = interesting();
  std::vector<uint16_t> out(values.size());
  encode_bf16(values, out);
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(out[i], bf16_from_f32(values[i])) << i;

  std::vector<float> back(values.size());
  decode_bf16(out, back);
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(f32_from_bf16(out[i])))
        << i;

  for (size_t offset : {0u, 1u, 3u, 196001u})
    for (size_t n = 0; n < 70; ++n) {
      std::vector<uint16_t> part(n + 1, 0x1234);
      encode_bf16(std::span(values).subspan(offset, n), std::span(part).first(n));
      for (size_t i = 0; i < n; ++i) ASSERT_EQ(part[i], out[offset + i]);
      ASSERT_EQ(part[n], 0x1234);
    }
}

TEST(Bf16, SizesMustAgree) {
  std::vector<float> a(3);
  std::vector<uint16_t> b(2);
  EXPECT_THROW(encode_bf16(a, b), InvariantError);
  EXPECT_THROW(decode_bf16(b, a), InvariantError);
}

}  // namespace
}  // namespace dovetail

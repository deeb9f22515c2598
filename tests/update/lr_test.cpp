#include "dovetail/update/lr.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

std::string error_of(const LrSchedule& s) {
  try {
    validate(s);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

LrSchedule make(LrKind kind, int64_t warmup, int64_t total, int64_t decay = 0,
                LrTail tail = LrTail::linear) {
  const LrSchedule s{.kind = kind,
                     .peak = 1,
                     .floor = kind == LrKind::constant ? 0 : 0.1,
                     .warmup_steps = warmup,
                     .total_steps = total,
                     .decay_steps = decay,
                     .tail = tail};
  validate(s);
  return s;
}

TEST(Lr, WarmUpIsLinearAndEndsAtThePeak) {
  for (LrKind kind : {LrKind::constant, LrKind::cosine, LrKind::linear, LrKind::wsd}) {
    const LrSchedule s = make(kind, 4, 100, kind == LrKind::wsd ? 10 : 0);
    EXPECT_FLOAT_EQ(lr_at(s, 1), 0.25f);
    EXPECT_FLOAT_EQ(lr_at(s, 3), 0.75f);
    EXPECT_EQ(lr_at(s, 4), 1.0f);
    EXPECT_LE(lr_at(s, 5), 1.0f);
  }
}

TEST(Lr, WithoutWarmUpTheFirstStepIsOneStepIntoTheDecay) {
  EXPECT_EQ(lr_at(make(LrKind::constant, 0, 0), 1), 1.0f);
  EXPECT_EQ(lr_at(make(LrKind::wsd, 0, 10, 4), 1), 1.0f);
  EXPECT_FLOAT_EQ(lr_at(make(LrKind::linear, 0, 10), 1), 0.1f + 0.9f * 0.9f);
  EXPECT_FLOAT_EQ(lr_at(make(LrKind::linear, 0, 1), 1), 0.1f);
}

TEST(Lr, ConstantStays) {
  const LrSchedule s = make(LrKind::constant, 2, 0);
  EXPECT_EQ(lr_at(s, 3), 1.0f);
  EXPECT_EQ(lr_at(s, int64_t{1} << 60), 1.0f);
}

TEST(Lr, CosineAndLinear) {
  const LrSchedule cosine = make(LrKind::cosine, 10, 110), linear = make(LrKind::linear, 10, 110);
  EXPECT_FLOAT_EQ(lr_at(cosine, 60), 0.55f);
  EXPECT_FLOAT_EQ(lr_at(linear, 60), 0.55f);
  EXPECT_FLOAT_EQ(lr_at(cosine, 35), 0.1f + 0.9f * (1 + std::sqrt(0.5f)) / 2);
  EXPECT_FLOAT_EQ(lr_at(linear, 35), 0.775f);
  for (const LrSchedule& s : {cosine, linear}) {
    for (int64_t step = 11; step <= 110; ++step) EXPECT_LT(lr_at(s, step), lr_at(s, step - 1));
    EXPECT_EQ(lr_at(s, 110), 0.1f);
    EXPECT_EQ(lr_at(s, 111), 0.1f);
    EXPECT_EQ(lr_at(s, int64_t{1} << 60), 0.1f);
  }
}

TEST(Lr, WsdDecaysAlongItsTail) {
  const LrSchedule linear = make(LrKind::wsd, 10, 100, 20, LrTail::linear);
  const LrSchedule cosine = make(LrKind::wsd, 10, 100, 20, LrTail::cosine);
  const LrSchedule root = make(LrKind::wsd, 10, 100, 20, LrTail::one_minus_sqrt);
  for (const LrSchedule& s : {linear, cosine, root}) {
    EXPECT_EQ(lr_at(s, 11), 1.0f);
    EXPECT_EQ(lr_at(s, 80), 1.0f);
    EXPECT_LT(lr_at(s, 81), 1.0f);
    EXPECT_GT(lr_at(s, 99), 0.1f);
    EXPECT_EQ(lr_at(s, 100), 0.1f);
    EXPECT_EQ(lr_at(s, 101), 0.1f);
  }
  EXPECT_FLOAT_EQ(lr_at(linear, 85), 0.1f + 0.9f * 0.75f);
  EXPECT_FLOAT_EQ(lr_at(cosine, 85), 0.1f + 0.9f * (1 + std::sqrt(0.5f)) / 2);
  EXPECT_FLOAT_EQ(lr_at(root, 85), 0.1f + 0.9f * 0.5f);
}

TEST(Lr, WsdMayDecayFromTheEndOfTheWarmUp) {
  const LrSchedule s = make(LrKind::wsd, 10, 30, 20);
  EXPECT_EQ(lr_at(s, 10), 1.0f);
  EXPECT_FLOAT_EQ(lr_at(s, 11), 0.1f + 0.9f * 0.95f);
}

TEST(Lr, ErrorsNameTheField) {
  using testing::HasSubstr;
  const LrSchedule good{.kind = LrKind::cosine, .peak = 1, .warmup_steps = 10, .total_steps = 100};
  EXPECT_EQ(error_of(good), "");
  const auto with = [&](auto change) {
    LrSchedule s = good;
    change(s);
    return error_of(s);
  };
  EXPECT_THAT(with([](auto& s) { s.peak = -1; }), HasSubstr("peak"));
  EXPECT_THAT(with([](auto& s) { s.peak = NAN; }), HasSubstr("peak"));
  EXPECT_THAT(with([](auto& s) { s.floor = 2; }), HasSubstr("floor"));
  EXPECT_THAT(with([](auto& s) { s.floor = NAN; }), HasSubstr("floor"));
  EXPECT_THAT(with([](auto& s) { s.warmup_steps = -1; }), HasSubstr("warmup_steps"));
  EXPECT_THAT(with([](auto& s) { s.total_steps = 10; }), HasSubstr("total_steps"));
  EXPECT_THAT(with([](auto& s) { s.decay_steps = 5; }), HasSubstr("decay_steps"));
  EXPECT_THAT(with([](auto& s) { s.tail = LrTail::cosine; }), HasSubstr("tail"));
  EXPECT_THAT(with([](auto& s) { s.kind = LrKind::wsd; }), HasSubstr("decay_steps"));
  EXPECT_THAT(with([](auto& s) { s.kind = LrKind::wsd, s.decay_steps = 91; }),
              HasSubstr("decay_steps"));
  EXPECT_EQ(with([](auto& s) { s.kind = LrKind::wsd, s.decay_steps = 90; }), "");
  EXPECT_THAT(with([](auto& s) { s.kind = LrKind::constant, s.floor = 0.1; }), HasSubstr("floor"));
  EXPECT_THROW(lr_at(good, 0), InvariantError);
}

TEST(Lr, NamesParseBack) {
  for (LrKind k : {LrKind::constant, LrKind::cosine, LrKind::linear, LrKind::wsd})
    EXPECT_EQ(parse_lr_kind(name_of(k)), k);
  for (LrTail t : {LrTail::linear, LrTail::cosine, LrTail::one_minus_sqrt})
    EXPECT_EQ(parse_lr_tail(name_of(t)), t);
  EXPECT_THROW(parse_lr_kind("cosin"), ConfigError);
  EXPECT_THROW(parse_lr_tail(""), ConfigError);
}

}  // namespace
}  // namespace dovetail

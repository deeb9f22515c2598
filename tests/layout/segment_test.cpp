#include "dovetail/layout/segment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

using testing::HasSubstr;

// Two zero2 shards of 20, each cut at 8 and 16: the last sub-shard of four is empty, the third short.
SegmentLayout uneven() {
  SegmentLayout l{.zero1 = 8, .zero2 = 2, .zero3 = 1, .shard1 = 8, .shard2 = 20, .shard3 = 40, .bound = 36,
                  .placements = {}};
  l.placements = {{0, 0, 10, 1}, {1, 12, 24, 4}, {2, 36, 4, 4}};
  return l;
}

std::string error_of(const SegmentLayout& l) {
  try {
    verify(l);
  } catch (const PlanError& e) {
    return e.what();
  }
  return "no error";
}

TEST(SegmentLayout, LastSubShardsAreShortOrEmpty) {
  const SegmentLayout l = uneven();
  verify(l);
  const std::vector<Interval> wanted{{0, 8}, {8, 16}, {16, 20}, {20, 20}, {20, 28}, {28, 36}, {36, 40}, {40, 40}};
  for (int64_t q = 0; q < 8; ++q) EXPECT_EQ(l.zero1_interval(q), wanted[q]) << q;
  EXPECT_EQ(l.zero2_interval(1), (Interval{20, 40}));
  EXPECT_EQ(l.zero3_interval(0), (Interval{0, 40}));
}

TEST(SegmentLayout, EveryBoundaryOfEveryLevelIsChecked) {
  // Tensor 1 at 12 has blocks of 4 and crosses 16, 20 and 28.
  for (int64_t block : {1, 2, 4}) {
    SegmentLayout l = uneven();
    l.placements[1].block = block;
    EXPECT_EQ(error_of(l), "no error") << block;
  }
  SegmentLayout l = uneven();
  l.placements[1].block = 8;  // the first cut, at 16, is 4 after the start
  EXPECT_THAT(error_of(l), HasSubstr("tensor 1: shard boundary 16, 4 elements after its start, cuts a block of 8"));
  l = uneven();
  l.placements[1] = {1, 14, 22, 2};
  EXPECT_EQ(error_of(l), "no error");
  l.placements[1].block = 6;  // 16 is 2 after the start
  EXPECT_THAT(error_of(l), HasSubstr("shard boundary 16"));
  l.placements[1] = {1, 10, 26, 6};  // 16 is clean; the zero2 boundary 20 is not
  EXPECT_THAT(error_of(l), HasSubstr("shard boundary 20, 10 elements after its start"));
  l.placements[1] = {1, 16, 16, 4};  // 20 and 28 are clean
  EXPECT_EQ(error_of(l), "no error");
  l.placements[1] = {1, 16, 16, 16};
  EXPECT_THAT(error_of(l), HasSubstr("shard boundary 20, 4 elements"));
}

TEST(SegmentLayout, ErrorsNameTheTensor) {
  SegmentLayout l = uneven();
  l.placements[1].offset = 9;
  EXPECT_THAT(error_of(l), HasSubstr("tensor 1 starts at 9, before the end 10"));
  l = uneven();
  l.placements[2].numel = 5;
  EXPECT_THAT(error_of(l), HasSubstr("tensor 2 ends at 41, past the 40 elements"));
  l = uneven();
  l.placements[2].tensor = 0;
  EXPECT_THAT(error_of(l), HasSubstr("tensor 0 is placed twice"));
  l = uneven();
  l.placements[2].block = 5;
  EXPECT_THAT(error_of(l), HasSubstr("tensor 2: 4 elements in blocks of 5"));
  l = uneven();
  l.placements[0].block = 0;
  EXPECT_THAT(error_of(l), HasSubstr("tensor 0: 10 elements in blocks of 0"));
  l = uneven();
  std::swap(l.placements[0], l.placements[1]);
  EXPECT_THAT(error_of(l), HasSubstr("starts at 0, before"));
}

TEST(SegmentLayout, LevelsMustNest) {
  SegmentLayout l = uneven();
  l.shard3 = 41;
  EXPECT_THAT(error_of(l), HasSubstr("do not make a zero3 shard of 41"));
  l = uneven();
  l.shard1 = 4;  // 4 x 4 < 20
  EXPECT_THAT(error_of(l), HasSubstr("do not divide a zero2 shard of 20"));
  l = uneven();
  l.shard1 = 21;
  EXPECT_THAT(error_of(l), HasSubstr("do not divide a zero2 shard of 20"));
  l = uneven();
  l.zero2 = 3;
  EXPECT_THAT(error_of(l), HasSubstr("zero3 | zero2 | zero1"));
  l = uneven();
  l.bound = 41;
  EXPECT_THAT(error_of(l), HasSubstr("lower bound"));
}

TEST(SegmentLayout, OwningNothingIsNormal) {
  SegmentLayout l{.zero1 = 4, .zero2 = 2, .zero3 = 1, .placements = {{0, 0, 0, 1}, {1, 0, 0, 1}}};
  verify(l);
  for (int64_t q = 0; q < 4; ++q) EXPECT_EQ(l.zero1_interval(q).size(), 0);
  verify(SegmentLayout{});
}

}  // namespace
}  // namespace dovetail

// The worked example of docs/notation.md, number by number.
#include "dovetail/layout/shard_chain.h"

#include <gtest/gtest.h>

#include <random>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

// Element space 64; zero1 = 4, zero2 = zero3 = 2.
const Placement kWo{0, 0, 24, 1}, kWq{1, 24, 32, 1}, kB{2, 56, 8, 1};

SegmentLayout worked_example() {
  return {.zero1 = 4, .zero2 = 2, .zero3 = 2, .shard1 = 16, .shard2 = 32, .shard3 = 32, .bound = 32,
          .placements = {kWo, kWq, kB}};
}

// Quarters 0, 1, 2, 3 lie on ranks 0, 2, 1, 3.
constexpr int64_t kQuarterOfRank[] = {0, 2, 1, 3};

ShardChain chain(const Placement& p, int64_t rank) {
  return {worked_example(), p, rank % 2, rank % 2, kQuarterOfRank[rank]};
}

TEST(WorkedExample, TheLayoutIsLegalAndItsQuartersAreSixteen) {
  const SegmentLayout l = worked_example();
  verify(l);
  EXPECT_EQ(l.size(), 64);
  for (int64_t q = 0; q < 4; ++q) EXPECT_EQ(l.zero1_interval(q), (Interval{16 * q, 16 * q + 16}));
}

TEST(WorkedExample, EveryChain) {
  const std::string none = "zero3[0,0)@0 zero2[0,0)@0 zero1[0,0)@0";
  EXPECT_EQ(chain(kWo, 0).to_text(), "whole[0,24) zero3[0,24)@0 zero2[0,24)@0 zero1[0,16)@0");
  EXPECT_EQ(chain(kWo, 2).to_text(), "whole[0,24) zero3[0,24)@0 zero2[0,24)@0 zero1[16,24)@0");
  EXPECT_EQ(chain(kWo, 1).to_text(), "whole[0,24) " + none);
  EXPECT_EQ(chain(kWo, 3).to_text(), "whole[0,24) " + none);

  EXPECT_EQ(chain(kWq, 0).to_text(), "whole[0,32) zero3[0,8)@24 zero2[0,8)@24 zero1[0,0)@0");
  EXPECT_EQ(chain(kWq, 2).to_text(), "whole[0,32) zero3[0,8)@24 zero2[0,8)@24 zero1[0,8)@8");
  EXPECT_EQ(chain(kWq, 1).to_text(), "whole[0,32) zero3[8,32)@0 zero2[8,32)@0 zero1[8,24)@0");
  EXPECT_EQ(chain(kWq, 3).to_text(), "whole[0,32) zero3[8,32)@0 zero2[8,32)@0 zero1[24,32)@0");

  EXPECT_EQ(chain(kB, 0).to_text(), "whole[0,8) " + none);
  EXPECT_EQ(chain(kB, 2).to_text(), "whole[0,8) " + none);
  EXPECT_EQ(chain(kB, 1).to_text(), "whole[0,8) zero3[0,8)@24 zero2[0,8)@24 zero1[0,0)@0");
  EXPECT_EQ(chain(kB, 3).to_text(), "whole[0,8) zero3[0,8)@24 zero2[0,8)@24 zero1[0,8)@8");
}

TEST(WorkedExample, WholeTensorsLieAtTheirOffsetsInTheGatheredSpace) {
  for (const Placement& p : {kWo, kWq, kB})
    for (int64_t rank = 0; rank < 4; ++rank) EXPECT_EQ(chain(p, rank).buffer_offset(Level::whole), p.offset);
}

TEST(WorkedExample, LocalIndices) {
  const ShardChain c = chain(kWq, 1);  // zero1 holds [8,24), zero3 [8,32)
  EXPECT_EQ(c.to_original(Level::zero1, 0), 8);
  EXPECT_EQ(c.to_original(Level::zero1, 15), 23);
  EXPECT_EQ(c.to_local(Level::zero1, 23), 15);
  EXPECT_EQ(c.convert(Level::zero1, 5, Level::whole), 13);
  EXPECT_EQ(c.convert(Level::whole, 13, Level::zero3), 5);
  EXPECT_EQ(c.convert(Level::zero3, 23, Level::whole), 31);
  EXPECT_THROW(c.convert(Level::zero3, 16, Level::zero1), InvariantError);  // element 24 is on rank 3
  EXPECT_THROW(c.to_original(Level::zero1, 16), InvariantError);
  EXPECT_THROW(c.to_original(Level::zero1, -1), InvariantError);
  EXPECT_THROW(c.to_local(Level::zero1, 7), InvariantError);
  EXPECT_THROW(chain(kWo, 1).to_original(Level::zero1, 0), InvariantError);

  const ShardChain last = chain(kWq, 3);  // zero1 holds [24,32)
  EXPECT_EQ(last.convert(Level::zero1, 0, Level::zero3), 16);
}

TEST(WorkedExample, WhoHoldsTheHeads) {
  const Interval head0{0, 16}, head1{16, 32};  // of Wq; [24,40) and [40,56) in element space
  const int64_t in_head0[] = {0, 8, 8, 0}, in_head1[] = {0, 8, 0, 8};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const Interval held = chain(kWq, rank).held(Level::zero1);
    EXPECT_EQ(intersect(held, head0).size(), in_head0[rank]) << rank;
    EXPECT_EQ(intersect(held, head1).size(), in_head1[rank]) << rank;
  }
  // Head 0: the lower half on rank 2, the upper on rank 1. Ties go to the lowest element: rank 2 owns it.
  EXPECT_EQ(intersect(chain(kWq, 2).held(Level::zero1), head0), (Interval{0, 8}));
  EXPECT_EQ(intersect(chain(kWq, 1).held(Level::zero1), head0), (Interval{8, 16}));
  EXPECT_EQ(intersect(chain(kWq, 1).held(Level::zero1), head1), (Interval{16, 24}));
  EXPECT_EQ(intersect(chain(kWq, 3).held(Level::zero1), head1), (Interval{24, 32}));
}

TEST(ShardChain, ShardsThatDoNotNestAreRefused) {
  const SegmentLayout l = worked_example();
  EXPECT_THROW(ShardChain(l, kWq, 0, 1, 2), InvariantError);
  EXPECT_THROW(ShardChain(l, kWq, 1, 1, 1), InvariantError);
  EXPECT_THROW(ShardChain(l, kWq, 2, 2, 4), InvariantError);
}

// Against the definition, element by element, on layouts with short and empty last shards.
TEST(ShardChain, MatchesAWalkOverTheElementSpace) {
  std::mt19937 random(7);
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 200; ++round) {
    SegmentLayout l;
    l.zero3 = pick(1, 3), l.zero2 = l.zero3 * pick(1, 3), l.zero1 = l.zero2 * pick(1, 4);
    const int64_t ratio = l.zero1 / l.zero2;
    l.shard2 = pick(1, 24);
    l.shard1 = pick((l.shard2 + ratio - 1) / ratio, l.shard2);
    l.shard3 = l.shard2 * (l.zero2 / l.zero3);
    const int64_t begin = pick(0, l.size()), numel = pick(0, l.size() - begin);
    const Placement p{0, begin, numel, 1};
    l.placements = {p};
    verify(l);
    for (int64_t q = 0; q < l.zero1; ++q) {
      const int64_t s2 = q / ratio, s3 = s2 / (l.zero2 / l.zero3);
      const ShardChain c(l, p, s3, s2, q);
      int64_t local3 = 0, local2 = 0, local1 = 0;
      for (int64_t i = 0; i < numel; ++i) {
        const int64_t e = begin + i, in2 = e % l.shard2;
        const bool on3 = e / l.shard3 == s3, on2 = e / l.shard2 == s2, on1 = on2 && in2 / l.shard1 == q % ratio;
        ASSERT_EQ(c.held(Level::zero3).contains(i), on3);
        ASSERT_EQ(c.held(Level::zero2).contains(i), on2);
        ASSERT_EQ(c.held(Level::zero1).contains(i), on1);
        if (on3) {
          ASSERT_EQ(c.to_local(Level::zero3, i), local3++);
        }
        if (on2) {
          ASSERT_EQ(c.to_local(Level::zero2, i), local2);
          ASSERT_EQ(c.buffer_offset(Level::zero2) + local2++, in2);
        }
        if (on1) {
          ASSERT_EQ(c.to_original(Level::zero1, local1), i);
          ASSERT_EQ(c.buffer_offset(Level::zero1) + local1++, in2 % l.shard1);
          ASSERT_EQ(c.convert(Level::zero1, c.to_local(Level::zero1, i), Level::zero3), local3 - 1);
        }
      }
      EXPECT_EQ(c.held(Level::zero1).size(), local1);
    }
  }
}

}  // namespace
}  // namespace dovetail

#include "dovetail/plan/degrees.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "dovetail/base/error.h"

namespace dovetail::plan {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr RankGroup kKinds[] = {RankGroup::gather,      RankGroup::reduce,  RankGroup::refresh,
                                RankGroup::reduce_main, RankGroup::replica, RankGroup::main};

TEST(Degrees, QuartersOfTheWorkedExample) {
  const Degrees d{4, 2, 2};
  const int64_t quarter[] = {0, 2, 1, 3};
  for (int64_t rank = 0; rank < 4; ++rank) {
    const GridPosition p = position_of(d, rank);
    EXPECT_EQ(zero1_shard(d, p), quarter[rank]);
    EXPECT_EQ(zero2_shard(d, p), rank % 2);
    EXPECT_EQ(zero3_shard(d, p), rank % 2);
  }
  EXPECT_THAT(rank_groups(d, 4, RankGroup::main), ElementsAre(ElementsAre(0, 2, 1, 3)));
  EXPECT_THAT(rank_groups(d, 4, RankGroup::gather), ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3)));
  EXPECT_THAT(rank_groups(d, 4, RankGroup::refresh), ElementsAre(ElementsAre(0, 2), ElementsAre(1, 3)));
  EXPECT_EQ(to_text(d), "4,2,2");
}

// An in-place gather in rank order would garble the shards here.
TEST(Degrees, EightRanksShareInShardOrder) {
  const Degrees d{8, 4, 2};
  const int64_t q[] = {0, 4, 2, 6, 1, 5, 3, 7};
  for (int64_t rank = 0; rank < 8; ++rank) EXPECT_EQ(zero1_shard(d, position_of(d, rank)), q[rank]) << rank;
  // Ranks 0, 2, 4, 6 share a zero3 shard; of what they share they hold parts 0, 2, 1, 3.
  EXPECT_THAT(rank_groups(d, 8, RankGroup::refresh), ElementsAre(ElementsAre(0, 4, 2, 6), ElementsAre(1, 5, 3, 7)));
  EXPECT_THAT(rank_groups(d, 8, RankGroup::gather),
              ElementsAre(ElementsAre(0, 1), ElementsAre(2, 3), ElementsAre(4, 5), ElementsAre(6, 7)));
  EXPECT_THAT(rank_groups(d, 8, RankGroup::reduce), ElementsAre(ElementsAre(0, 2, 1, 3), ElementsAre(4, 6, 5, 7)));
  EXPECT_THAT(rank_groups(d, 8, RankGroup::reduce_main),
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6), ElementsAre(3, 7)));
  EXPECT_THAT(rank_groups(d, 8, RankGroup::main), ElementsAre(ElementsAre(0, 4, 2, 6, 1, 5, 3, 7)));
}

TEST(Degrees, ReplicasHoldTheSameShard) {
  const Degrees d{4, 2, 1};
  EXPECT_THAT(rank_groups(d, 12, RankGroup::replica),
              ElementsAre(ElementsAre(0, 4, 8), ElementsAre(1, 5, 9), ElementsAre(2, 6, 10), ElementsAre(3, 7, 11)));
}

TEST(Degrees, LegalChains) {
  EXPECT_THAT(legal_chains(1), ElementsAre(Degrees{1, 1, 1}));
  EXPECT_THAT(legal_chains(4),
              ElementsAre(Degrees{1, 1, 1}, Degrees{2, 1, 1}, Degrees{2, 2, 1}, Degrees{2, 2, 2}, Degrees{4, 1, 1},
                          Degrees{4, 2, 1}, Degrees{4, 2, 2}, Degrees{4, 4, 1}, Degrees{4, 4, 2}, Degrees{4, 4, 4}));
  for (int64_t world = 1; world <= 64; ++world) {
    std::vector<Degrees> all;
    for (int64_t z1 = 1; z1 <= world; ++z1)
      for (int64_t z2 = 1; z2 <= z1; ++z2)
        for (int64_t z3 = 1; z3 <= z2; ++z3)
          if (world % z1 == 0 && z1 % z2 == 0 && z2 % z3 == 0) all.push_back({z1, z2, z3});
    EXPECT_EQ(legal_chains(world), all) << world;
  }
}

TEST(Degrees, IllegalChainsNameTheNumbers) {
  const auto error = [](Degrees d, int64_t world) -> std::string {
    try {
      validate(d, world);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(error({4, 2, 2}, 6), HasSubstr("got zero3 2, zero2 2, zero1 4, world 6"));
  EXPECT_THAT(error({6, 4, 2}, 12), HasSubstr("got zero3 2, zero2 4, zero1 6, world 12"));
  EXPECT_THAT(error({4, 4, 3}, 4), HasSubstr("got zero3 3"));
  EXPECT_THAT(error({1, 2, 1}, 2), HasSubstr("zero2 2, zero1 1"));
  EXPECT_THAT(error({0, 0, 0}, 4), HasSubstr("got zero3 0"));
  EXPECT_THAT(error({-2, -2, -2}, 4), HasSubstr("got zero3 -2"));
  EXPECT_THAT(error({1, 1, 1}, 0), HasSubstr("world 0"));
  EXPECT_EQ(error({12, 6, 2}, 24), "no error");
  EXPECT_THROW(legal_chains(0), ConfigError);
  EXPECT_THROW(rank_groups({3, 1, 1}, 4, RankGroup::gather), ConfigError);
}

// What two members of a group of this kind have in common and what tells them apart.
struct Share {
  std::vector<int64_t> common;
  int64_t apart;
};

Share share(const Degrees& d, RankGroup kind, int64_t rank) {
  const GridPosition p = position_of(d, rank);
  const int64_t s1 = zero1_shard(d, p), s2 = zero2_shard(d, p), s3 = zero3_shard(d, p);
  switch (kind) {
    case RankGroup::gather: return {{p.i2, p.i1, p.replica}, s3};
    case RankGroup::reduce: return {{p.i1, p.replica}, s2};
    case RankGroup::refresh: return {{s3, p.replica}, s1};
    case RankGroup::reduce_main: return {{s2, p.replica}, s1};
    case RankGroup::replica: return {{s1}, p.replica};
    case RankGroup::main: return {{p.replica}, s1};
  }
  return {};
}

int64_t size_of_group(const Degrees& d, int64_t world, RankGroup kind) {
  switch (kind) {
    case RankGroup::gather: return d.zero3;
    case RankGroup::reduce: return d.zero2;
    case RankGroup::refresh: return d.zero1 / d.zero3;
    case RankGroup::reduce_main: return d.zero1 / d.zero2;
    case RankGroup::replica: return world / d.zero1;
    case RankGroup::main: return d.zero1;
  }
  return 0;
}

void check_grid(const Degrees& d, int64_t world) {
  std::set<std::vector<int64_t>> positions;
  for (int64_t rank = 0; rank < world; ++rank) {
    const GridPosition p = position_of(d, rank);
    ASSERT_EQ(rank_at(d, p), rank);
    ASSERT_TRUE(p.i3 < d.zero3 && p.i2 < d.zero2 / d.zero3 && p.i1 < d.zero1 / d.zero2);
    ASSERT_LT(p.replica, world / d.zero1);
    positions.insert({p.i3, p.i2, p.i1, p.replica});
    // Shards nest, and every shard number exists.
    ASSERT_EQ(zero1_shard(d, p) / (d.zero1 / d.zero2), zero2_shard(d, p));
    ASSERT_EQ(zero2_shard(d, p) / (d.zero2 / d.zero3), zero3_shard(d, p));
    ASSERT_LT(zero1_shard(d, p), d.zero1);
  }
  ASSERT_EQ(std::ssize(positions), world);
}

void check_groups(const Degrees& d, int64_t world, RankGroup kind) {
  std::set<int> seen;
  std::set<std::vector<int64_t>> commons;
  for (const std::vector<int>& group : rank_groups(d, world, kind)) {
    ASSERT_EQ(std::ssize(group), size_of_group(d, world, kind));
    const Share first = share(d, kind, group[0]);
    ASSERT_TRUE(commons.insert(first.common).second) << "two groups share what should be one group's";
    int64_t last = -1;
    for (int rank : group) {
      ASSERT_TRUE(seen.insert(rank).second);
      const Share s = share(d, kind, rank);
      ASSERT_EQ(s.common, first.common);
      ASSERT_GT(s.apart, last) << "not in shard order";
      last = s.apart;
    }
  }
  ASSERT_EQ(std::ssize(seen), world);
}

TEST(Degrees, AllLegalChainsUpToSixtyFourRanks) {
  for (int64_t world = 1; world <= 64; ++world) {
    for (const Degrees& d : legal_chains(world)) {
      SCOPED_TRACE(to_text(d) + " of " + std::to_string(world));
      check_grid(d, world);
      for (RankGroup kind : kKinds) check_groups(d, world, kind);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace dovetail::plan

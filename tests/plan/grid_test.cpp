#include "dovetail/plan/grid.h"

#include <gtest/gtest.h>

#include <random>

#include "brute_force.h"
#include "dovetail/plan/admissible.h"
#include "dovetail/plan/lower_bound.h"

namespace dovetail::plan {
namespace {

// F1, and its generalisation to two radices, against trying every start.
TEST(Grid, EarliestStartAgainstTryingAll) {
  std::mt19937 random(1);
  for (int n = 0; n < 60000; ++n) {
    Grid grid;
    grid.period = 1 + random() % 40;
    grid.step = n % 3 == 0 ? grid.period : 1 + static_cast<int64_t>(random() % grid.period);
    if (n % 3 == 1) grid.step = std::max<int64_t>(1, grid.period / (4 + random() % 10));
    RaggedTensor t;
    t.extent = 1 + random() % 60;
    t.block = 1 + random() % t.extent;
    const int64_t from = random() % 90;
    int64_t wanted = -1;
    for (int64_t x = from; x < from + 3 * grid.period && wanted < 0; ++x)
      if (brute::legal(t, x, {grid.period, grid.step})) wanted = x;
    ASSERT_EQ(grid.earliest_start(from, t), wanted)
        << "period " << grid.period << " step " << grid.step << " from " << from << " extent "
        << t.extent << " block " << t.block;
  }
}

TEST(Grid, EndOfRunIsOneTensorAfterTheOther) {
  std::mt19937 random(2);
  for (int n = 0; n < 20000; ++n) {
    Grid grid;
    grid.period = 1 + random() % 40;
    grid.step = n % 2 == 0 ? grid.period : 1 + static_cast<int64_t>(random() % grid.period);
    RaggedTensor t;
    t.extent = 1 + random() % 30;
    t.block = 1 + random() % t.extent;
    const int64_t from = random() % 60, copies = random() % 9;
    int64_t wanted = from;
    for (int64_t i = 0; i < copies && wanted >= 0; ++i) {
      const int64_t x = grid.earliest_start(wanted, t);
      wanted = x < 0 ? -1 : x + t.extent;
    }
    ASSERT_EQ(TensorOnGrid(grid, t).end_of_run(from, copies), wanted);
  }
}

TEST(Grid, BoundariesAreThoseOfTheDefinition) {
  for (int64_t period = 1; period < 12; ++period)
    for (int64_t step = 1; step <= period; ++step)
      for (int64_t x = 0; x < 30; ++x) {
        int64_t wanted = x + 1;
        while (!brute::is_boundary(wanted, {period, step})) ++wanted;
        ASSERT_EQ((Grid{period, step}.boundary_after(x)), wanted);
      }
}

TensorTypes types_of(const std::vector<RaggedTensor>& tensors) {
  std::vector<int> all(tensors.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  return group_by_type(tensors, all);
}

RaggedTensor random_tensor(std::mt19937& random, int64_t longest) {
  const int64_t extent = 1 + random() % longest;
  return {extent, 1 + static_cast<int64_t>(random() % extent)};
}

// F3: exactly the sizes at which every tensor has a place of its own.
TEST(Admissible, NextIsTheNextSizeThatEveryTensorCanLiveWith) {
  std::mt19937 random(3);
  for (int n = 0; n < 3000; ++n) {
    std::vector<RaggedTensor> tensors;
    for (int i = 1 + random() % 4; i > 0; --i) tensors.push_back(random_tensor(random, 40));
    const int64_t from = 1 + random() % 30;
    int64_t wanted = from;
    const auto admits = [&](int64_t s) {
      return std::all_of(tensors.begin(), tensors.end(), [s](const RaggedTensor& t) {
        for (int64_t x = 0; x < s; ++x)
          if (brute::legal(t, x, {s, s})) return true;
        return false;
      });
    };
    while (!admits(wanted)) ++wanted;
    ASSERT_EQ(next_admissible(types_of(tensors), from), wanted);
  }
}

// A step that the necessary condition passes over has no place for some tensor.
TEST(Admissible, StepsPassedOverHaveNoPlan) {
  std::mt19937 random(4);
  for (int n = 0; n < 3000; ++n) {
    const std::vector<RaggedTensor> tensors{random_tensor(random, 40)};
    const int64_t period = 2 + random() % 30;
    const int64_t from = 1 + random() % period;
    const int64_t next = next_admissible_step(types_of(tensors), period, from);
    ASSERT_LE(next, period);
    for (int64_t step = from; step < next; ++step)
      for (int64_t x = 0; x < period; ++x)
        ASSERT_FALSE(brute::legal(tensors[0], x, {period, step}));
  }
}

// Least shard that packs the blocks into bins, one by one, any bin.
bool bins_hold(std::vector<int64_t>& blocks, size_t next, std::vector<int64_t>& room) {
  if (next == blocks.size()) return true;
  for (size_t b = 0; b < room.size(); ++b) {
    if (room[b] < blocks[next]) continue;
    room[b] -= blocks[next];
    const bool held = bins_hold(blocks, next + 1, room);
    room[b] += blocks[next];
    if (held) return true;
    if (b + 1 < room.size() && room[b] == room[b + 1]) continue;
  }
  return false;
}

TEST(LowerBound, NeverAboveTheBestAssignmentOfBlocks) {
  std::mt19937 random(5);
  int tight = 0, raised = 0;
  for (int n = 0; n < 3000; ++n) {
    std::vector<RaggedTensor> tensors;
    for (int i = 1 + random() % 6; i > 0; --i) {
      const int64_t extent = 1 + random() % 20;
      tensors.push_back({extent, std::max<int64_t>(1, extent / (1 + random() % 2))});
    }
    const int64_t shards = 1 + random() % 4;
    std::vector<int64_t> blocks;
    for (const RaggedTensor& t : tensors)
      for (int64_t at = 0; at < t.extent; at += t.block)
        blocks.push_back(std::min(t.block, t.extent - at));
    std::sort(blocks.rbegin(), blocks.rend());
    int64_t best = 1;
    for (;; ++best) {
      std::vector<int64_t> room(shards, best);
      if (bins_hold(blocks, 0, room)) break;
    }
    const int64_t counting = counting_bound(types_of(tensors), shards);
    const int64_t bound = block_bound(types_of(tensors), shards);
    ASSERT_LE(bound, best);
    ASSERT_LE(counting, bound);
    tight += bound == best;
    raised += bound > counting;
  }
  EXPECT_GT(tight, 2000);
  EXPECT_GT(raised, 20);  // the dual bounds earn their keep
}

}  // namespace
}  // namespace dovetail::plan

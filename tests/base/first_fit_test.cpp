#include "dovetail/base/first_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "dovetail/base/interval.h"

namespace dovetail {
namespace {

TEST(FirstFit, GivesDisjointPiecesAndJoinsThemAgain) {
  FirstFit room(100, 10'100);
  std::vector<Interval> taken;
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2) {
      const int64_t bytes = 1 + random() % 700;
      int64_t used = 0, gap = 0, end = 100;
      std::ranges::sort(taken, {}, &Interval::begin);
      std::optional<int64_t> first;  // by the definition
      for (const Interval& t : taken) {
        if (!first && t.begin - end >= bytes) first = end;
        gap = std::max(gap, t.begin - end);
        end = t.end;
        used += t.size();
      }
      if (!first && 10'100 - end >= bytes) first = end;
      ASSERT_EQ(room.left(), 10'000 - used);
      ASSERT_EQ(room.largest(), std::max(gap, 10'100 - end));
      const auto got = room.take(bytes);
      ASSERT_EQ(got, first);
      refused += !got;
      if (got) taken.push_back({*got, *got + bytes});
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      room.give(taken.back().begin, taken.back().size());
      taken.pop_back();
    }
  }
  EXPECT_GT(refused, 0);
  for (const Interval& t : taken) room.give(t.begin, t.size());
  EXPECT_EQ(room.largest(), 10'000);
}

}  // namespace
}  // namespace dovetail

#include "dovetail/layout/slot_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

using testing::ElementsAre;

TEST(SlotPolicy, TheSmallestFittingFreeSlot) {
  SlotPolicy p({100, 40, 60, 40});
  EXPECT_EQ(p.acquire(50), 2);
  EXPECT_EQ(p.acquire(40), 1);  // a tie: the lowest number
  EXPECT_EQ(p.acquire(1), 3);
  EXPECT_EQ(p.acquire(1), 0);
  EXPECT_EQ(p.in_use_count(), 4);
  EXPECT_EQ(p.total(), 240);
}

TEST(SlotPolicy, TheLargestFreeSlotGrows) {
  SlotPolicy p({30, 50, 50, 90});
  EXPECT_EQ(p.acquire(90), 3);
  EXPECT_EQ(p.acquire(70), 1);
  EXPECT_THAT(p.sizes(), ElementsAre(30, 70, 50, 90));
}

TEST(SlotPolicy, ANewSlotOnlyWhenNoneIsFree) {
  SlotPolicy p;
  EXPECT_EQ(p.acquire(10), 0);
  EXPECT_EQ(p.acquire(5), 1);
  p.release(0);
  EXPECT_FALSE(p.in_use(0));
  EXPECT_TRUE(p.in_use(1));
  EXPECT_EQ(p.acquire(12), 0);
  EXPECT_THAT(p.sizes(), ElementsAre(12, 5));
}

TEST(SlotPolicy, ZeroBytesAreARequestLikeAnyOther) {
  SlotPolicy p({8});
  EXPECT_EQ(p.acquire(0), 0);
  EXPECT_EQ(p.acquire(0), 1);
  EXPECT_THAT(p.sizes(), ElementsAre(8, 0));
}

TEST(SlotPolicy, OnlySlotsInUseAreReleased) {
  SlotPolicy p({8});
  EXPECT_THROW(p.release(0), InvariantError);
  EXPECT_THROW(p.release(1), InvariantError);
  EXPECT_THROW(p.release(-1), InvariantError);
  EXPECT_THROW(p.acquire(-1), InvariantError);
  p.release(p.acquire(3));
  EXPECT_THROW(p.release(0), InvariantError);
}

}  // namespace
}  // namespace dovetail

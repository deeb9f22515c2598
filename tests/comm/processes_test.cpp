// Ranks as processes: a normal run, and what the others report when one is killed, stopped, throws or leaves.
#include <gmock/gmock.h>

#include <csignal>

#include "tests/comm/processes.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr auto kStart = 60s;  // loading torch takes a while on a busy machine

TEST(Processes, AllGetTheSameResults) {
  for (int size : {2, 3}) {
    RankProcesses ranks("normal", size, 30s);
    for (int r = 0; r < size; ++r) ASSERT_EQ(ranks.wait(r, kStart), 0) << ranks.output(r);
    for (int r = 0; r < size; ++r) {
      EXPECT_THAT(ranks.output(r), HasSubstr("hash"));
      EXPECT_EQ(ranks.output(r), ranks.output(0));
    }
  }
}

// Sends the signal to one of four ranks in the middle of things; all others must end by `within`, naming it.
void check_survivors(int victim, int number, std::chrono::milliseconds deadline, std::chrono::milliseconds within) {
  RankProcesses ranks("loop", 4, deadline);
  for (int r = 0; r < 4; ++r) ASSERT_TRUE(ranks.wait_for_output(r, "running", kStart)) << r << ": " << ranks.output(r);
  const auto start = std::chrono::steady_clock::now();
  ranks.signal(victim, number);
  for (int r = 0; r < 4; ++r) {
    if (r == victim) continue;
    EXPECT_EQ(ranks.wait(r, within + 10s), 3) << r << ": " << ranks.output(r);
    const auto took = std::chrono::steady_clock::now() - start;
    EXPECT_LT(took, within) << r << ": " << ranks.output(r);
    EXPECT_THAT(ranks.output(r), HasSubstr("rank " + std::to_string(victim)));
    EXPECT_THAT(ranks.output(r), testing::AnyOf(HasSubstr("of pair"), HasSubstr("of across")));
  }
}

TEST(Processes, AKilledRankIsNamedByAll) { check_survivors(3, SIGKILL, 30s, 10s); }
TEST(Processes, TheKilledHolderOfTheStoreIsNamedByAll) { check_survivors(0, SIGKILL, 30s, 10s); }
TEST(Processes, AStoppedRankIsNamedByAllWithinTheDeadline) { check_survivors(2, SIGSTOP, 3s, 9s); }
TEST(Processes, TheStoppedHolderOfTheStoreIsNamedByAllWithinTheDeadline) { check_survivors(0, SIGSTOP, 3s, 9s); }

TEST(Processes, ARankThatThrowsIsNamedWithItsReason) {
  RankProcesses ranks("throw", 4, 30s);
  EXPECT_EQ(ranks.wait(1, kStart), 4);
  for (int r : {0, 2, 3}) {
    EXPECT_EQ(ranks.wait(r, 10s), 3);
    EXPECT_THAT(ranks.output(r), HasSubstr("rank 1 data.bin: truncated"));
  }
}

TEST(Processes, ARankThatLeavesEarlyIsNamed) {
  RankProcesses ranks("exit", 4, 4s);
  for (int r : {0, 2, 3}) {
    EXPECT_EQ(ranks.wait(r, kStart), 3) << ranks.output(r);
    EXPECT_THAT(ranks.output(r), HasSubstr("rank 1"));
  }
  EXPECT_EQ(ranks.wait(1, 10s), 0) << ranks.output(1);
}

}  // namespace
}  // namespace dovetail::comm

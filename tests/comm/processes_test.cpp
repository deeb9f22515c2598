// Ranks as processes: a normal run, and what the others report when one is killed, stopped, throws or leaves.
#include <gmock/gmock.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tests/comm/processes.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr auto kStart = 60s;  // loading torch takes a while on a busy machine

// By transport, see RankProcesses.
class Processes : public testing::TestWithParam<std::string> {};

TEST_P(Processes, AllGetTheSameResults) {
  for (int size : {2, 3}) {
    if (GetParam() == "hosts") size = 2 * size;  // as many hosts as there are ranks otherwise
    RankProcesses ranks(GetParam(), "normal", size, 30s);
    for (int r = 0; r < size; ++r) ASSERT_EQ(ranks.wait(r, kStart), 0) << ranks.output(r);
    const std::string hash = ranks.output(0);
    RankProcesses reference("gloo", "normal", size, 30s);
    ASSERT_EQ(reference.wait(0, kStart), 0) << reference.output(0);
    EXPECT_EQ(hash, reference.output(0));
    for (int r = 0; r < size; ++r) {
      EXPECT_THAT(ranks.output(r), HasSubstr("hash"));
      EXPECT_EQ(ranks.output(r), ranks.output(0));
    }
  }
}

// Sends the signal to one of four ranks in the middle of things; all others must end by `within`, naming it.
void check_survivors(const std::string& transport, int victim, int number, std::chrono::milliseconds deadline,
                     std::chrono::milliseconds within) {
  RankProcesses ranks(transport, "loop", 4, deadline);
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

TEST_P(Processes, AKilledRankIsNamedByAll) { check_survivors(GetParam(), 3, SIGKILL, 30s, 10s); }
TEST_P(Processes, TheKilledHolderOfTheStoreIsNamedByAll) { check_survivors(GetParam(), 0, SIGKILL, 30s, 10s); }
TEST_P(Processes, AStoppedRankIsNamedByAllWithinTheDeadline) { check_survivors(GetParam(), 2, SIGSTOP, 3s, 9s); }
TEST_P(Processes, TheStoppedHolderOfTheStoreIsNamedByAllWithinTheDeadline) {
  check_survivors(GetParam(), 0, SIGSTOP, 3s, 9s);
}

TEST_P(Processes, ARankThatThrowsIsNamedWithItsReason) {
  RankProcesses ranks(GetParam(), "throw", 4, 30s);
  EXPECT_EQ(ranks.wait(1, kStart), 4);
  for (int r : {0, 2, 3}) {
    EXPECT_EQ(ranks.wait(r, 10s), 3);
    EXPECT_THAT(ranks.output(r), HasSubstr("rank 1 data.bin: truncated"));
  }
}

TEST_P(Processes, ARankThatLeavesEarlyIsNamed) {
  RankProcesses ranks(GetParam(), "exit", 4, 4s);
  for (int r : {0, 2, 3}) {
    EXPECT_EQ(ranks.wait(r, kStart), 3) << ranks.output(r);
    EXPECT_THAT(ranks.output(r), HasSubstr("rank 1"));
  }
  EXPECT_EQ(ranks.wait(1, 10s), 0) << ranks.output(1);
}

// Shared memory has no name: when the last process is gone, so is it.
TEST(PeerProcesses, AKilledJobLeavesNothingInMemory) {
  auto left = [] {
    int64_t names = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      names += entry.path().filename().string().find("dovetail") != std::string::npos;
    return names;
  };
  auto shared_kib = [] {
    std::ifstream in("/proc/meminfo");
    for (std::string word; in >> word;)
      if (word == "Shmem:" && in >> word) return static_cast<int64_t>(std::stoll(word));
    return int64_t{-1};
  };
  const int64_t before = shared_kib();
  int64_t during = 0;
  {
    RankProcesses ranks("peer", "loop", 3, 30s);
    for (int r = 0; r < 3; ++r) ASSERT_TRUE(ranks.wait_for_output(r, "running", kStart)) << ranks.output(r);
    during = shared_kib();
    for (int r = 0; r < 3; ++r) ranks.signal(r, SIGKILL);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(ranks.wait(r, 10s), 128 + SIGKILL);
  }
  EXPECT_GT(during, before + 1000) << "the ranks share no memory";
  // Of the whole machine, so other tests may hold some for a while.
  const auto until = std::chrono::steady_clock::now() + 60s;
  while (shared_kib() >= before + (during - before) / 4 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(100ms);
  EXPECT_LT(shared_kib(), before + (during - before) / 4);
  EXPECT_EQ(left(), 0);
}

// A rank killed or stopped at any moment ends all others in time with its number. DOVETAIL_SOAK says how many
// moments (make soak: 200).
TEST(PeerProcesses, ARankKilledAtAnyMomentEndsTheOthers) {
  const char* asked = std::getenv("DOVETAIL_SOAK");
  const int rounds = asked ? std::atoi(asked) : 5;
  std::mt19937 random(std::random_device{}());
  for (int round = 0; round < rounds; ++round) {
    const int victim = static_cast<int>(random() % 3), number = random() % 4 == 0 ? SIGSTOP : SIGKILL;
    const auto moment = std::chrono::microseconds(random() % 400'000);
    SCOPED_TRACE(testing::Message() << "round " << round << ": rank " << victim << " gets signal " << number
                                    << " after " << moment.count() << " us");
    RankProcesses ranks(random() % 2 ? "peer" : "hosts", "loop", 4, 4s);
    for (int r = 0; r < 4; ++r)
      ASSERT_TRUE(ranks.wait_for_output(r, "running", kStart)) << r << ": " << ranks.output(r);
    std::this_thread::sleep_for(moment);
    ranks.signal(victim, number);
    for (int r = 0; r < 4; ++r) {
      if (r == victim) continue;
      EXPECT_EQ(ranks.wait(r, 20s), 3) << r << ": " << ranks.output(r);
      EXPECT_THAT(ranks.output(r), HasSubstr("rank " + std::to_string(victim)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, Processes, testing::Values("gloo", "peer", "hosts"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace dovetail::comm

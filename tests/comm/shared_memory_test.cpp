// What transports promise whose ranks address one another's memory; the others only that they give none.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <fstream>
#include <string>

#include "dovetail/base/error.h"
#include "dovetail/comm/peer/arena.h"
#include "tests/comm/reference.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

// The kernel's own answer to a file beyond the limit is a signal.
TEST(PeerArena, ALimitOfFileSizesIsAnError) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit small = limit;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  std::string said;
  try {
    Arena::create(2 << 20, 4096);
  } catch (const CommError& error) {
    said = error.what();
  }
  const bool fits = Arena::create(1 << 20, 4096) != nullptr;
  setrlimit(RLIMIT_FSIZE, &limit);
  EXPECT_THAT(said, testing::AllOf(testing::HasSubstr("2097152"), testing::HasSubstr("ulimit -f"),
                                   testing::HasSubstr("1048576")));
  EXPECT_TRUE(fits);
}

// A dump would take memory for every page of it, twice what the machine has.
TEST(PeerArena, StaysOutOfCoreDumps) {
  const std::shared_ptr<Arena> arena = Arena::create(1 << 20, 4096);
  std::ifstream maps("/proc/self/smaps");
  int arenas = 0;
  bool of_arena = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with("VmFlags:")) {
      if (of_arena) EXPECT_THAT(line, testing::HasSubstr(" dd"));
      of_arena = false;
    } else if (line.find("memfd:dovetail") != std::string::npos) {
      of_arena = true;
      ++arenas;
    }
  }
  EXPECT_GE(arenas, 1);
}

class SharedMemoryOf : public testing::TestWithParam<World> {
 protected:
  void each(const std::function<void(Group&)>& body) { run(GetParam(), body); }
};

// Input in memory that the transport shares, of which few pages are written; what nobody wrote counts as zero.
TEST_P(SharedMemoryOf, ReducesWhatWasWritten) {
  each([&](Group& g) {
    SharedMemory* shared = g.shared_memory();
    EXPECT_EQ(shared != nullptr, g.host_ranks() > 1 || (GetParam().transport == "symmetric" && g.size() > 1));
    const int64_t own = 40'000, total = own * g.size();
    std::vector<float> elsewhere(static_cast<size_t>(total));
    const std::shared_ptr<std::byte> piece = shared ? shared->allocate(total * 4 + 4096) : nullptr;
    // Not at the start of a page.
    auto* input = piece ? reinterpret_cast<float*>(piece.get()) + 3 : elsewhere.data();
    for (int round = 0; round < 4; ++round) {
      const bool accumulate = round % 2 == 1, zero = round >= 2;
      std::fill_n(input, total, 1.0f);
      if (shared)
        shared->zero(reinterpret_cast<std::byte*>(input), total * 4);
      else
        std::fill_n(input, total, 0.0f);
      // A row here and there, another one on each rank, and the very last elements.
      for (int64_t i = 0; i < total; ++i)
        if ((i / 100 + 7 * g.rank()) % 50 == 3 || i >= total - 2) input[i] = value_at(g.rank(), i);
      std::vector<float> output(static_cast<size_t>(own), zero ? 0.0f : 0.5f);
      const auto slices = even_slices(g.size(), own);
      std::vector<std::byte> scratch(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)));
      ReduceScatter request{.input = reinterpret_cast<const std::byte*>(input), .slices = slices,
                            .output = output.data(), .accumulate = accumulate, .scratch = scratch, .sparse = true,
                            .output_is_zero = zero};
      std::vector<float> shown(static_cast<size_t>(own), 0.0f);
      request.finished = [&](int64_t begin, std::span<const float> run) {
        std::copy(run.begin(), run.end(), shown.begin() + begin);
      };
      g.reduce_scatter(request, {Phase::reduce, 0, round, "sparse"})->wait();
      for (int64_t i = 0; i < own; ++i) {
        const int64_t at = g.rank() * own + i;
        const float sum = tree_value(iota(g.size()), [&](int r) {
          return (at / 100 + 7 * r) % 50 == 3 || at >= total - 2 ? value_at(r, at) : 0.0f;
        });
        ASSERT_EQ(output[i], accumulate ? (zero ? 0.0f : 0.5f) + sum : sum) << i << " in round " << round;
        if (sum != 0) {
          ASSERT_EQ(shown[i], output[i]) << i << " in round " << round;
        }
      }
    }
  });
}

// What all members allocate together lies at the same place for all, and is the whole of their shards.
TEST_P(SharedMemoryOf, MemoryTogetherIsOneRun) {
  each([&](Group& g) {
    if (g.needs_gather_buffer() || g.size() == 1) return;
    for (int64_t each : {0, 1000, 100'000}) {
      const std::shared_ptr<std::byte> run = g.allocate_together(each * g.size(), {Phase::control, 1, 0, "together"});
      if (each == 0) continue;
      std::byte* mine = run.get() + g.rank() * each;
      for (int64_t i = 0; i < each; ++i) {
        ASSERT_EQ(mine[i], std::byte{0});
        mine[i] = byte_at(g.rank(), i);
      }
      const Counts before = g.counters().read();
      const GatherPlane plane{mine, nullptr, even_slices(g.size(), each)};
      Gathered gathered = g.all_gather({&plane, 1}, {Phase::gather_forward, 1, 0, "views"});
      gathered.work->wait();
      EXPECT_EQ(gathered.whole[0], run.get());
      EXPECT_EQ((g.counters().read() - before).sent(), 0);
      for (int m = 0; m < g.size(); ++m)
        for (int64_t i = 0; i < each; ++i) ASSERT_EQ(run.get()[m * each + i], byte_at(m, i));
      g.barrier({});
    }
    EXPECT_THROW(g.allocate_together(g.rank() + 1, {}), InvariantError);
  });
}

// Waits of ranks that differ in order, with operands that peers read where they lie.
TEST_P(SharedMemoryOf, OperandsInSharedMemoryMayBeWrittenAfterTheWait) {
  each([&](Group& g) {
    SharedMemory* shared = g.shared_memory();
    if (!shared) return;
    constexpr int kSlots = 3;
    const int64_t own = 5000, total = own * g.size();
    const auto slices = even_slices(g.size(), own);
    const std::shared_ptr<std::byte> memory = shared->allocate(kSlots * total * 4);
    auto* slots = reinterpret_cast<float*>(memory.get());
    std::vector<float> output(static_cast<size_t>(kSlots * own));
    std::vector<std::byte> scratch(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)) * kSlots);
    for (int round = 0; round < 20; ++round) {
      std::vector<WorkHandle> works;
      for (int k = 0; k < kSlots; ++k) {
        float* input = slots + k * total;
        std::fill_n(input, total, static_cast<float>(g.rank() + k + round));
        const size_t bytes = scratch.size() / kSlots;
        works.push_back(g.reduce_scatter({reinterpret_cast<const std::byte*>(input), DType::f32, slices,
                                          output.data() + k * own, false,
                                          std::span(scratch).subspan(k * bytes, bytes)},
                                         {Phase::reduce, k, round, "slots"}));
      }
      for (int k = 0; k < kSlots; ++k) {
        const int which = (k + g.rank()) % kSlots;
        works[which]->wait();
        std::fill_n(slots + which * total, total, NAN);
      }
      const float ranks = static_cast<float>(g.size() * (g.size() - 1) / 2);
      for (int k = 0; k < kSlots; ++k)
        for (int64_t i = 0; i < own; ++i)
          ASSERT_EQ(output[k * own + i], ranks + static_cast<float>(g.size() * (k + round)));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, SharedMemoryOf, testing::ValuesIn(all_worlds()), name_of_world);

}  // namespace
}  // namespace dovetail::comm

// Groups over symmetric memory beyond what all groups promise: the arena, faults between agreement and copies, and the
// order of a device's work, on a fake device with streams. The conformance suite runs over it too (transports.h).
#include <gmock/gmock.h>

#include <bit>
#include <cstdlib>
#include <random>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "tests/comm/processes.h"
#include "tests/comm/reference.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

std::vector<Interval> ragged(int size, int64_t unit) {
  std::vector<int64_t> sizes;
  for (int m = 0; m < size; ++m) sizes.push_back(m % 3 == 1 ? 0 : unit * (m + 1) + m);
  return slices_of(sizes);
}

// Memory for operands: of the arena, or the test's own.
struct Operand {
  std::shared_ptr<std::byte> piece;
  std::vector<std::byte> own;
  Operand(Group& g, int64_t bytes, bool shared) : own(shared ? 0 : static_cast<size_t>(bytes)) {
    if (shared) piece = g.shared_memory()->allocate(bytes);
  }
  std::byte* data() { return piece ? piece.get() : own.data(); }
  float* floats() { return reinterpret_cast<float*>(data()); }
};

// Hashes of the results of every collective, per rank, with operands in the arena or elsewhere.
std::vector<uint64_t> results(const World& world, bool shared) {
  std::vector<uint64_t> hashes(static_cast<size_t>(world.size));
  run(world, [&](Group& g) {
    uint64_t hash = 0;
    const int n = g.size(), me = g.rank();
    for (int64_t unit : {0, 1, 333, 20'000}) {
      const auto slices = ragged(n, unit);
      const int64_t total = slices.back().end, own = slices[me].size();
      Operand input(g, total * 4, shared);
      for (int64_t i = 0; i < total; ++i) input.floats()[i] = value_at(me, i);
      for (DType dtype : {DType::f32, DType::bf16}) {
        if (dtype == DType::bf16)  // numbers: which of two NaNs a sum keeps is nobody's promise
          for (int64_t i = 0; i < 2 * total; ++i)
            reinterpret_cast<uint16_t*>(input.data())[i] =
                static_cast<uint16_t>(std::bit_cast<uint32_t>(value_at(me, i)) >> 16);
        std::vector<float> output(static_cast<size_t>(own), 0.5f);
        std::vector<std::byte> scratch(static_cast<size_t>(g.reduce_scratch_bytes(dtype, slices)));
        g.reduce_scatter({input.data(), dtype, slices, output.data(), dtype == DType::bf16, scratch},
                         {Phase::reduce, 0, unit, "sums"})->wait();
        hash = hash64(std::as_bytes(std::span(output)), hash);
      }
      for (int64_t i = 0; i < total; ++i) input.floats()[i] = value_at(me, i);
      std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(total)));
      g.all_reduce({input.floats(), static_cast<size_t>(total)}, scratch, {Phase::norm, 0, unit, "sums"})->wait();
      hash = hash64({input.data(), static_cast<size_t>(total * 4)}, hash);
      Operand shard(g, own, shared), whole(g, total, shared);
      for (int64_t i = 0; i < own; ++i) shard.data()[i] = byte_at(me, i);
      const GatherPlane plane{shard.data(), whole.data(), slices};
      g.all_gather({&plane, 1}, {Phase::gather_forward, 0, unit, "planes"}).work->wait();
      hash = hash64({whole.data(), static_cast<size_t>(total)}, hash);
    }
    hashes[me] = hash;
  });
  return hashes;
}

TEST(Symmetric, BitsAreThoseOfThreadsWhereverOperandsLie) {
  for (int size : {2, 3, 4}) {
    const auto wanted = results({"threads", size}, false);
    EXPECT_EQ(results({"symmetric", size}, false), wanted);
    EXPECT_EQ(results({"symmetric", size}, true), wanted);
  }
}

TEST(Symmetric, AnArenaThatIsFullSaysWhatIsLeftAndIsUsedAgain) {
  spawn_symmetric(2, [](Group& g) {
    SharedMemory& memory = *g.shared_memory();
    EXPECT_EQ(memory.allocate(0), nullptr);
    auto a = memory.allocate(40'000), b = memory.allocate(40'000);
    for (int64_t i = 0; i < 40'000; ++i) ASSERT_EQ(b.get()[i], std::byte{0});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(b.get()) % 4096, 0u);
    EXPECT_THAT([&] { memory.allocate(20'000); },
                testing::ThrowsMessage<StateError>(AllOf(HasSubstr("wanted 20000 bytes"), HasSubstr("arena of 98304"),
                                                         HasSubstr("with 16384 left"))));
    // Staging of an operand elsewhere needs room too; nobody has been told of the operation yet.
    std::vector<float> elsewhere(20'000, 1.0f);
    std::vector<std::byte> space(static_cast<size_t>(g.all_reduce_scratch_bytes(20'000)));
    EXPECT_THROW(g.all_reduce(elsewhere, space, {}), StateError);
    std::memset(b.get(), 1, 40'000);
    a = b = nullptr;
    for (int round = 0; round < 3; ++round) {  // what operations borrow comes back
      const auto all = memory.allocate(98'304);
      EXPECT_EQ(std::ranges::count(std::span(all.get(), 98'304), std::byte{0}), 98'304);
      // The whole arena is the operand: none of it can be copied.
      std::fill_n(reinterpret_cast<float*>(all.get()), 24'576, 1.0f);
      std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(24'576)));
      if (round > 0)
        g.all_reduce({reinterpret_cast<float*>(all.get()), 24'576}, scratch, {Phase::norm, 0, round, "all"})->wait();
      EXPECT_EQ(reinterpret_cast<float*>(all.get())[24'575], round > 0 ? 2.0f : 1.0f);
    }
    g.all_reduce(elsewhere, space, {Phase::norm, 0, 9, "elsewhere"})->wait();
    EXPECT_THAT(elsewhere, testing::Each(2.0f));
    EXPECT_NE(memory.allocate(98'304), nullptr);
  }, kSpawnDeadline, {.capacity = 98'000});
}

TEST(Symmetric, PiecesOutliveTheirWorld) {
  std::vector<std::shared_ptr<std::byte>> pieces(2);
  spawn_symmetric(2, [&](Group& g) { pieces[g.rank()] = g.shared_memory()->allocate(100); }, kSpawnDeadline);
  for (auto& piece : pieces) std::memset(piece.get(), 7, 100);
}

// Every rank's error where a world cannot be made.
std::vector<std::string> refusals(int size, const FakeFaults& faults, bool of_options) {
  try {
    spawn_symmetric(size, [](Group&) { ADD_FAILURE() << "a world was made"; }, 5s, {.faults = faults});
  } catch (const ConfigError& error) {
    EXPECT_TRUE(of_options) << error.what();
    return {error.what()};
  } catch (const CommError& error) {
    EXPECT_FALSE(of_options) << error.what();
    return {error.what()};
  }
  return {"none"};
}

TEST(Symmetric, AWorldThatCannotBeMadeNamesTheRank) {
  EXPECT_THAT(refusals(3, {.elsewhere = 2}, true)[0], HasSubstr("all ranks on one host, got rank 2 on another"));
  EXPECT_THAT(refusals(3, {.other_size = 1}, true)[0],
              AllOf(HasSubstr("25165824 bytes on rank 0"), HasSubstr("25169920 on rank 1")));
  EXPECT_THAT(refusals(2, {.no_memory = 1}, false)[0], HasSubstr("rank 1: symmetric memory: out of memory"));
  EXPECT_THAT(refusals(2, {.not_mapped = 0}, false)[0], HasSubstr("rank 0: symmetric memory: no access"));
}

// A rank that is lost after all have agreed: its signals never come.
TEST(Symmetric, ARankThatIsLostAmongTheCopiesIsNamedAtTheDeadline) {
  for (int size : {2, 3, 4}) {
    std::vector<std::string> texts(static_cast<size_t>(size));
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THROW(spawn_symmetric(size, [&](Group& g) {
      std::vector<float> data(1000, 1.0f);
      std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(1000)));
      try {
        g.all_reduce(data, scratch, {Phase::norm, 4, 8, "lost"})->wait();
      } catch (const CommError& error) {
        texts[g.rank()] = error.what();
        EXPECT_THROW(g.barrier({}), CommError);
        throw;
      }
    }, 700ms, {.faults = {.mute = size - 1}}), CommError);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
    for (int r = 0; r + 1 < size; ++r)
      EXPECT_THAT(texts[r], AllOf(HasSubstr("norm of lost, step 8"), HasSubstr("operand is complete within 700 ms"),
                                  HasSubstr("rank " + std::to_string(size - 1) + " has not signalled")));
  }
}

TEST(Symmetric, MoreGroupsThanSignalChannelsAreRefusedOnAllRanks) {
  const size_t before = ::c10d::symmetric_memory::get_signal_pad_size();
  ::c10d::symmetric_memory::set_signal_pad_size(36);  // three ranks: three channels
  spawn_symmetric(3, [](Group& g) {
    const std::vector<std::vector<int>> lists{{0, 1}, {2}};
    std::vector<std::unique_ptr<Group>> groups;
    for (int i = 0; i < 2; ++i) groups.push_back(g.split(lists));
    EXPECT_THAT([&] { g.split(lists); },
                testing::ThrowsMessage<ConfigError>(AllOf(HasSubstr("group 3"), HasSubstr("got 3 in pads of 36"))));
    groups.back()->barrier({});
    g.barrier({});
  }, kSpawnDeadline);
  ::c10d::symmetric_memory::set_signal_pad_size(before);
}

TEST(Symmetric, MessagesGoToOthersAndToOneself) {
  for (const int size : {1, 3}) run({"symmetric", size}, [&](Group& g) {
    const int to = (g.rank() + 1) % size, from = (g.rank() + size - 1) % size;
    std::vector<std::byte> a(5000), b(300), empty, in_a(5000), in_b(300), own(7), in_own(7);
    for (int i = 0; i < 5000; ++i) a[i] = byte_at(g.rank(), i);
    for (int i = 0; i < 300; ++i) b[i] = byte_at(50 + g.rank(), i);
    for (int i = 0; i < 7; ++i) own[i] = byte_at(90 + g.rank(), i);
    const std::vector<Send> sends{{g.rank(), own}, {to, a}, {to, empty}, {to, b}};
    const std::vector<Receive> receives{{g.rank(), in_own}, {from, in_a}, {from, empty}, {from, in_b}};
    g.exchange(sends, receives, {Phase::fragment, 0, 0, "pieces"})->wait();
    EXPECT_EQ(in_own, own);
    for (int i = 0; i < 5000; ++i) ASSERT_EQ(in_a[i], byte_at(from, i));
    for (int i = 0; i < 300; ++i) ASSERT_EQ(in_b[i], byte_at(50 + from, i));
  });
}

TEST(Symmetric, TorchKnowsTheRanksByAName) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  // A name serves once in a process, and tests may be repeated in it.
  const std::string called = fmt::format("symmetric test {}", Clock::now().time_since_epoch().count());
  auto name = name_ranks(called, 1, 3, store);
  EXPECT_EQ(::c10d::resolve_process_group(called)->getGroupName(), called);
  EXPECT_EQ(::c10d::resolve_process_group(called)->getRank(), 1);
  EXPECT_EQ(::c10d::symmetric_memory::get_group_info(called).world_size, 3);
  EXPECT_THAT([&] { name_ranks(called, 1, 3, store); },
              testing::ThrowsMessage<ConfigError>(HasSubstr(called)));
  name = nullptr;
  EXPECT_ANY_THROW(::c10d::resolve_process_group(called));
}

TEST(Symmetric, IsRefusedWhereTorchHasNone) {
  WorldOptions o{.size = 1, .store = c10::make_intrusive<::c10d::HashStore>(),
                 .backend = parse_world_backend("symmetric")};
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<ConfigError>(HasSubstr("arena of 0 bytes")));
  if (::c10d::symmetric_memory::has_allocator(at::kCUDA)) GTEST_SKIP() << "torch has symmetric memory for CUDA";
  o.arena = 1 << 20;
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<ConfigError>(
                                          AllOf(HasSubstr("backend symmetric"), HasSubstr("torch without CUDA"))));
}

// Runs where it can: two processes, a GPU each or both on one, against threads on the host.
TEST(Symmetric, OnCuda) {
  if (!::c10d::symmetric_memory::has_allocator(at::kCUDA))
    GTEST_SKIP() << "torch has no allocator of symmetric memory for CUDA: it is built without CUDA";
  if (!c10::impl::hasDeviceGuardImpl(at::kCUDA) || c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() < 1)
    GTEST_SKIP() << "torch has symmetric memory for CUDA, but this machine has no device";
  if (c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount() == 1)
    ::setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1", 1);  // for the processes to come
  RankProcesses ranks("symmetric", "device", 2, 60s), wanted("gloo", "device", 2, 60s);
  for (int r = 0; r < 2; ++r) {
    ASSERT_EQ(ranks.wait(r, 120s), 0) << ranks.output(r);
    ASSERT_EQ(wanted.wait(r, 120s), 0) << wanted.output(r);
    EXPECT_THAT(ranks.output(r), HasSubstr("hash"));
    EXPECT_EQ(ranks.output(r), wanted.output(r));
  }
}

}  // namespace
}  // namespace dovetail::comm

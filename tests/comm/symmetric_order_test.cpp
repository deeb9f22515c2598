// What symmetric groups enqueue on a device with streams, where nothing has happened when a call returns: operands are
// read after the caller's stream has written them and before it writes them again, results are there for what it
// enqueues next. The caller's own work runs on its stream, late, and the devices differ in speed.
#include <gmock/gmock.h>

#include <cmath>

#include "tests/comm/fake_device.h"
#include "tests/comm/reference.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;

// One rank's caller: its stream is the current one of its device.
struct Caller {
  at::Device device;
  explicit Caller(Group& world) : device(at::kPrivateUse1, static_cast<at::DeviceIndex>(world.rank())) {}
  void enqueue(std::function<void()> work) const { fake_device::on_current_stream(device, std::move(work)); }
  void fill(float* to, int64_t n, uint32_t stream, std::chrono::milliseconds after) const {
    enqueue([=] {
      std::this_thread::sleep_for(after);
      for (int64_t i = 0; i < n; ++i) to[i] = value_at(stream, i);
    });
  }
  void spoil(float* to, int64_t n) const {
    enqueue([=] { std::fill_n(to, n, NAN); });
  }
  std::shared_ptr<std::vector<float>> look(const float* at, int64_t n) const {
    auto seen = std::make_shared<std::vector<float>>(static_cast<size_t>(n));
    enqueue([=] { std::copy_n(at, n, seen->begin()); });
    return seen;
  }
};

void run_devices(int size, const std::function<void(Group&, const Caller&)>& body) {
  spawn_symmetric(size, [&](Group& g) {
    const Caller caller(g);
    body(g, caller);
    fake_device::synchronize(caller.device);
    g.barrier({Phase::control, -1, 0, "end"});
  }, kSpawnDeadline, {.device = at::kPrivateUse1});
}

class Order : public testing::TestWithParam<bool> {};  // operands in the arena?

TEST_P(Order, SumsReadOperandsBetweenTheWritesOfTheirOwner) {
  for (int size : {2, 3, 4}) run_devices(size, [&](Group& g, const Caller& caller) {
    const int64_t own = 1000, total = own * size;
    const auto slices = even_slices(size, own);
    std::vector<float> elsewhere(static_cast<size_t>(total)), output(static_cast<size_t>(own));
    std::vector<std::byte> scratch(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)));
    std::vector<std::shared_ptr<std::vector<float>>> seen;
    for (uint32_t round = 0; round < 5; ++round) {
      // Memory that comes and goes: the next round's lies where this one's lay.
      const std::shared_ptr<std::byte> piece = GetParam() ? g.shared_memory()->allocate(total * 4) : nullptr;
      float* input = piece ? reinterpret_cast<float*>(piece.get()) : elsewhere.data();
      caller.fill(input, total, 10 * round + g.rank(), std::chrono::milliseconds(3 * ((g.rank() + round) % size)));
      const WorkHandle work = g.reduce_scatter(
          {reinterpret_cast<std::byte*>(input), DType::f32, slices, output.data(), false, scratch},
          {Phase::reduce, 0, round, "late"});
      work->wait();
      caller.spoil(input, total);
      seen.push_back(caller.look(output.data(), own));
      caller.spoil(output.data(), own);
    }
    fake_device::synchronize(caller.device);
    for (uint32_t round = 0; round < 5; ++round)
      for (int64_t i = 0; i < own; ++i)
        ASSERT_EQ((*seen[round])[i], tree_value(iota(size), [&](int r) {
          return value_at(10 * round + r, g.rank() * own + i);
        })) << "round " << round << " element " << i;
  });
}

TEST_P(Order, AllReducesKeepTheirHalvesApart) {
  for (int size : {2, 3, 4}) run_devices(size, [&](Group& g, const Caller& caller) {
    const int64_t n = 1003;
    const std::shared_ptr<std::byte> piece = GetParam() ? g.shared_memory()->allocate(n * 4) : nullptr;
    std::vector<float> elsewhere(static_cast<size_t>(n));
    float* data = piece ? reinterpret_cast<float*>(piece.get()) : elsewhere.data();
    std::vector<std::byte> scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(n)));
    std::vector<std::shared_ptr<std::vector<float>>> seen;
    for (uint32_t round = 0; round < 5; ++round) {
      caller.fill(data, n, 10 * round + g.rank(), std::chrono::milliseconds(3 * ((g.rank() + round) % size)));
      g.all_reduce({data, static_cast<size_t>(n)}, scratch, {Phase::norm, 0, round, "late"})->wait();
      seen.push_back(caller.look(data, n));
      caller.spoil(data, n);
    }
    fake_device::synchronize(caller.device);
    for (uint32_t round = 0; round < 5; ++round)
      for (int64_t i = 0; i < n; ++i)
        ASSERT_EQ((*seen[round])[i], tree_value(iota(size), [&](int r) { return value_at(10 * round + r, i); }))
            << "round " << round << " element " << i;
  });
}

// Groups that cross, several operations of each in flight, awaited in an order of each rank's own.
TEST_P(Order, GroupsInFlightAtTheSameTimeDoNotMeet) {
  run_devices(4, [&](Group& g, const Caller& caller) {
    const auto row = g.split({{0, 1}, {2, 3}}), column = g.split({{0, 2}, {3, 1}});
    const std::vector<Group*> groups{row.get(), column.get(), &g};
    const int64_t own = 500;
    struct Part {
      std::shared_ptr<std::byte> piece;
      std::vector<float> input, whole;
      WorkHandle work;
      std::shared_ptr<std::vector<float>> seen;
    };
    std::vector<Part> parts(9);
    for (size_t k = 0; k < parts.size(); ++k) {
      Part& p = parts[k];
      Group& group = *groups[k % 3];
      p.input.resize(own);
      p.whole.resize(static_cast<size_t>(own * group.size()));
      if (GetParam()) p.piece = group.shared_memory()->allocate(own * 4);
      float* shard = p.piece ? reinterpret_cast<float*>(p.piece.get()) : p.input.data();
      caller.fill(shard, own, static_cast<uint32_t>(100 * k) + g.rank(), std::chrono::milliseconds(g.rank()));
      const GatherPlane plane{reinterpret_cast<std::byte*>(shard), reinterpret_cast<std::byte*>(p.whole.data()),
                              even_slices(group.size(), own * 4)};
      p.work = group.all_gather({&plane, 1}, {Phase::gather_forward, static_cast<int>(k), 0, "flight"}).work;
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      Part& p = parts[(i * 4 + g.rank() * 2) % parts.size()];
      p.work->wait();
      p.seen = caller.look(p.whole.data(), static_cast<int64_t>(p.whole.size()));
      if (p.piece) caller.spoil(reinterpret_cast<float*>(p.piece.get()), own);
    }
    fake_device::synchronize(caller.device);
    for (size_t k = 0; k < parts.size(); ++k) {
      const Group& group = *groups[k % 3];
      for (int m = 0; m < group.size(); ++m)
        for (int64_t i = 0; i < own; ++i)
          ASSERT_EQ((*parts[k].seen)[m * own + i],
                    value_at(static_cast<uint32_t>(100 * k) + group.global_ranks()[m], i));
    }
  });
}

TEST_P(Order, MessagesAreReadAfterTheyAreWritten) {
  run_devices(3, [&](Group& g, const Caller& caller) {
    const int to = (g.rank() + 1) % 3, from = (g.rank() + 2) % 3;
    const int64_t n = 700;
    const std::shared_ptr<std::byte> piece = GetParam() ? g.shared_memory()->allocate(n * 4) : nullptr;
    std::vector<float> elsewhere(static_cast<size_t>(n)), in(static_cast<size_t>(n)), own(static_cast<size_t>(n));
    float* out = piece ? reinterpret_cast<float*>(piece.get()) : elsewhere.data();
    const std::span<const std::byte> message(reinterpret_cast<std::byte*>(out), static_cast<size_t>(n * 4));
    caller.fill(out, n, g.rank(), std::chrono::milliseconds(5 * g.rank()));
    g.exchange(std::vector<Send>{{to, message}, {g.rank(), message}},
               std::vector<Receive>{{from, std::as_writable_bytes(std::span(in))},
                                    {g.rank(), std::as_writable_bytes(std::span(own))}},
               {Phase::fragment, 0, 0, "late"})->wait();
    caller.spoil(out, n);
    const auto seen = caller.look(in.data(), n), kept = caller.look(own.data(), n);
    fake_device::synchronize(caller.device);
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ((*seen)[i], value_at(from, i));
      ASSERT_EQ((*kept)[i], value_at(g.rank(), i));
    }
  });
}

// Rank 1's operand is complete only after rank 0's caller has got further.
TEST_P(Order, TheCallersOwnWorkGoesOnMeanwhile) {
  std::atomic<bool> further{false};
  run_devices(2, [&](Group& g, const Caller& caller) {
    const int64_t n = 100;
    const std::shared_ptr<std::byte> piece = GetParam() ? g.shared_memory()->allocate(n) : nullptr;
    std::vector<std::byte> elsewhere(static_cast<size_t>(n)), whole(static_cast<size_t>(2 * n));
    std::byte* shard = piece ? piece.get() : elsewhere.data();
    caller.enqueue([&further, shard, n, rank = g.rank()] {
      const auto until = std::chrono::steady_clock::now() + 5s;
      while (rank == 1 && !further && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(rank == 0 || further);
      for (int64_t i = 0; i < n; ++i) shard[i] = byte_at(rank, i);
    });
    const GatherPlane plane{shard, whole.data(), even_slices(2, n)};
    const WorkHandle work = g.all_gather({&plane, 1}, {Phase::gather_forward, 0, 0, "meanwhile"}).work;
    if (g.rank() == 0) caller.enqueue([&] { further = true; });
    work->wait();
    fake_device::synchronize(caller.device);
    for (int m = 0; m < 2; ++m)
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(whole[m * n + i], byte_at(m, i));
  });
}

INSTANTIATE_TEST_SUITE_P(Symmetric, Order, testing::Bool(),
                         [](const auto& info) { return info.param ? "InTheArena" : "Elsewhere"; });

}  // namespace
}  // namespace dovetail::comm

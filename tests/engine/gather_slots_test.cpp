// Slots that groups are gathered into one after another, in memory of all ranks (engine/gather_slots.h).
#include "dovetail/engine/gather_slots.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "dovetail/engine/context.h"
#include "tests/engine/support.h"

namespace dovetail {
namespace {

using namespace testing;
using engine_detail::GatherSlots;

// Ranks that make the same gathers, each at its own pace: it keeps what it has gathered for as long as it likes, and
// gives pages back when it likes. Every rank must have been given the same slot, and find there what all have written.
TEST(GatherSlots, NothingIsWrittenThatAnyRankReads) {
  constexpr int kGathers = 400;
  constexpr int64_t kOwn = 6000, kWords = kOwn / 8;  // pages in which two ranks' bytes meet
  for (const int size : {2, 3, 4})
    for (const int count : {2, 3, 5}) {
      std::mutex mutex;
      std::vector<std::set<int>> slots(kGathers);
      run_ranks(Transport::peer, size, [&](comm::Group& world) {
        const comm::Identity id{comm::Phase::control, 0, 0, "slots"};
        engine_detail::PeerAllocator allocator(*world.shared_memory());
        const Interval own{world.rank() * kOwn, (world.rank() + 1) * kOwn};
        GatherSlots gathered(world, allocator, size * kOwn, {own}, count, id);
        std::mt19937 random(static_cast<unsigned>(size * 100 + count * 10 + world.rank()));
        auto one_in = [&](unsigned n) { return random() % n == 0; };
        auto stamp = [](int gather, int rank) { return uint64_t{256} * gather + rank; };
        std::map<int, int> read;  // slots, by gather
        auto check = [&](int gather, int slot) {
          for (int m = 0; m < size; ++m) {
            const auto* words = reinterpret_cast<const uint64_t*>(gathered.data(slot) + m * kOwn);
            for (int64_t i = 0; i < kWords; ++i)
              ASSERT_EQ(words[i], stamp(gather, m)) << "gather " << gather << ", slot " << slot << ", word " << i;
          }
        };
        for (int gather = 0; gather < kGathers; ++gather) {
          const int slot = gathered.take(nullptr);
          {
            const std::lock_guard lock(mutex);
            slots[gather].insert(slot);
          }
          if (slot != GatherSlots::kNone) {
            auto* words = reinterpret_cast<uint64_t*>(gathered.data(slot) + own.begin);
            std::fill(words, words + kWords, stamp(gather, world.rank()));
          }
          if (one_in(8)) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
          world.barrier(id);  // as a gather in place is one
          if (slot != GatherSlots::kNone) read[gather] = slot;
          while (!read.empty() && !one_in(3)) {
            const auto [which, where] = *std::next(read.begin(), random() % read.size());
            check(which, where);
            read.erase(which);
            gathered.give(where);
          }
          if (one_in(10)) gathered.trim();
        }
        for (const auto& [which, where] : read) check(which, where);
      });
      int without = 0;
      for (const std::set<int>& of_one : slots) {
        EXPECT_EQ(of_one.size(), 1u) << "ranks differ";
        without += of_one.contains(GatherSlots::kNone);
      }
      EXPECT_LT(without, kGathers * 9 / 10) << size << " ranks, " << count << " slots";
    }
}

int64_t pages_of(const std::byte* data, int64_t bytes) {
  std::vector<unsigned char> pages(static_cast<size_t>(bytes / 4096));
  EXPECT_EQ(::mincore(const_cast<std::byte*>(data), static_cast<size_t>(bytes), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
}

TEST(GatherSlots, PagesGoOnceNoRankReadsThem) {
  run_ranks(Transport::peer, 2, [](comm::Group& world) {
    constexpr int64_t kOwn = int64_t{1} << 20;
    const comm::Identity id{comm::Phase::control, 0, 0, "slots"};
    engine_detail::PeerAllocator allocator(*world.shared_memory());
    const Interval own{world.rank() * kOwn, (world.rank() + 1) * kOwn};
    GatherSlots gathered(world, allocator, 2 * kOwn, {own}, 2, id);
    const int slot = gathered.take(nullptr);
    std::byte* mine = gathered.data(slot) + own.begin;
    std::memset(mine, 1, kOwn);
    world.barrier(id);
    if (world.rank() == 0) gathered.give(slot);
    world.barrier(id);
    gathered.trim();
    EXPECT_EQ(pages_of(mine, kOwn), kOwn / 4096) << "rank 1 reads them";
    world.barrier(id);
    if (world.rank() == 1) gathered.give(slot);
    world.barrier(id);
    gathered.trim();
    EXPECT_EQ(pages_of(mine, kOwn), 0);
  });
}

// Eight equal units, each of which shows where its weights lie and may be held up.
struct Layer : torch::nn::Module {
  Layer() { linear = register_module("linear", std::make_shared<ops::Linear>(64, 64)); }
  at::Tensor forward(at::Tensor x) {
    if (seen) seen(linear->weight);
    return at::tanh(linear->forward(x)) + x;
  }
  std::shared_ptr<ops::Linear> linear;
  std::function<void(const at::Tensor&)> seen;
};

struct Tower : torch::nn::Module {
  Tower() {
    for (int i = 0; i < 8; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), std::make_shared<ops::Unit<Layer>>()));
    head = register_module("head", std::make_shared<ops::Linear>(64, 8));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer->forward(x);
    return head->forward(x);
  }
  std::vector<std::shared_ptr<ops::Unit<Layer>>> layers;
  std::shared_ptr<ops::Linear> head;
};

struct Seen {
  std::string weights;              // bits, of rank 0
  std::set<const void*> places;     // of layers' weights, on all ranks
};

Seen train(Transport transport, int ranks, int prefetch, bool recompute, bool gathers_all) {
  Seen seen;
  std::mutex mutex;
  run_ranks(transport, ranks, [&](comm::Group& world) {
    auto model = std::make_shared<ops::Unit<Tower>>();
    initialise(*model, 7);
    EngineOptions o = options(ranks, ranks, ranks, "bf16");
    o.plan.prefetch = prefetch;
    o.recompute = recompute;
    Engine engine(model, borrow(world), o, adamw());
    std::mt19937 random(static_cast<unsigned>(world.rank()));
    for (auto& layer : model->layers)
      layer->seen = [&](const at::Tensor& weight) {
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        const std::lock_guard lock(mutex);
        seen.places.insert(weight.const_data_ptr());
      };
    for (int step = 0; step < 6; ++step) {
      for (int micro = 0; micro < 2; ++micro)
        model->forward(batch(4 * step + 2 * world.rank() + micro, {4, 64})).to(at::kFloat).square().sum().backward();
      {
        at::NoGradGuard no_grad;
        model->forward(batch(100 + step, {4, 64}));
      }
      if (gathers_all && step % 2 == 1) {
        engine.gather_all();
        engine.release_all();
      }
      engine.step(0.01f, 1);
    }
    const std::string weights = bits(whole_parameters(engine));
    if (world.rank() == 0) seen.weights = weights;
  });
  return seen;
}

TEST(GatherSlots, LayersTakeTurnsAndResultsStay) {
  for (const int ranks : {2, 4})
    for (const bool recompute : {false, true}) {
      const Seen apart = train(Transport::threads, ranks, 1, recompute, false);
      for (const int prefetch : {0, 1, 2}) {
        const Seen together = train(Transport::peer, ranks, prefetch, recompute, false);
        EXPECT_EQ(together.weights, apart.weights) << ranks << " ranks, prefetch " << prefetch;
        // The last one stays gathered until its backward, in a place of its own.
        EXPECT_EQ(std::ssize(together.places), GatherSlots::count(prefetch) + 1) << "of 8 layers";
      }
      // More at once than there are slots lie elsewhere, and give way to slots again.
      EXPECT_EQ(train(Transport::peer, ranks, 1, recompute, true).weights, apart.weights);
    }
}

}  // namespace
}  // namespace dovetail

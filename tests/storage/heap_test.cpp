#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "dovetail/storage/page_heap.h"
#include "dovetail/storage/tensor_heap.h"

namespace dovetail {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Block {
  std::byte* data;
  int64_t bytes;
  unsigned char mark;

  void write() const { std::memset(data, mark, static_cast<size_t>(bytes)); }
  bool intact() const {
    return std::all_of(data, data + bytes, [&](std::byte b) { return b == std::byte{mark}; });
  }
};

int64_t resident(const std::byte* begin, int64_t bytes) {
  std::vector<unsigned char> pages(static_cast<size_t>(bytes / 4096));
  EXPECT_EQ(::mincore(const_cast<std::byte*>(begin), static_cast<size_t>(bytes), pages.data()), 0);
  return 4096 * std::ranges::count_if(pages, [](unsigned char page) { return page & 1; });
}

// Takes and gives back at random; every block keeps what was written to it.
void use_at_random(PageHeap& heap, unsigned seed, int rounds) {
  std::mt19937 random(seed);
  std::vector<Block> blocks;
  for (int i = 0; i < rounds; ++i) {
    if (blocks.size() < 12 && random() % 5 < 3) {
      const int64_t bytes = 1 + static_cast<int64_t>(random() % (random() % 8 == 0 ? 5 * kMiB : 300'000));
      Block block{heap.allocate(bytes), bytes, static_cast<unsigned char>(random())};
      ASSERT_NE(block.data, nullptr);
      ASSERT_EQ(reinterpret_cast<uintptr_t>(block.data) % PageHeap::kAlignment, 0u);
      block.write();
      blocks.push_back(block);
    } else if (!blocks.empty()) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      ASSERT_TRUE(blocks.back().intact());
      heap.free(blocks.back().data, blocks.back().bytes);
      blocks.pop_back();
    }
  }
  for (const Block& block : blocks) {
    EXPECT_TRUE(block.intact());
    heap.free(block.data, block.bytes);
  }
}

TEST(PageHeap, BlocksOfManyThreadsKeepTheirBytes) {
  const auto heap = PageHeap::reserve(1024 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back([&, seed] { use_at_random(*heap, seed, 1500); });
  for (std::thread& t : threads) t.join();
  const PageHeap::Use use = heap->use();
  EXPECT_EQ(use.in_use, 0);
  EXPECT_GT(use.most_in_use, 0);
  EXPECT_LE(use.held, use.most_in_use + PageHeap::kIdle + 8 * PageHeap::kPage);
}

TEST(PageHeap, PagesOfABlockServeTheNext) {
  const auto heap = PageHeap::reserve(64 * kMiB);
  const Block first{heap->allocate(4 * kMiB), 4 * kMiB, 7};
  first.write();
  heap->free(first.data, first.bytes);
  const Block second{heap->allocate(3 * kMiB), 3 * kMiB, 7};
  EXPECT_EQ(second.data, first.data);
  EXPECT_TRUE(second.intact());  // neither faulted in nor zeroed anew
  EXPECT_EQ(heap->use().held, 4 * kMiB);
  EXPECT_EQ(heap->use().in_use, 3 * kMiB);
  heap->free(second.data, second.bytes);
}

// As a training step: activations grow to their height, then gradients elsewhere take their place.
TEST(PageHeap, HoldsNoMoreThanTheProcessNeededAtItsHeight) {
  int64_t elsewhere = 500 * kMiB;
  const auto heap = PageHeap::reserve(256 * kMiB, [&] { return elsewhere; });
  for (int step = 0; step < 3; ++step) {
    std::vector<Block> blocks;
    for (int i = 0; i < 60; ++i) {
      blocks.push_back({heap->allocate(kMiB), kMiB, 1});
      blocks.back().write();
    }
    const std::byte* base = blocks.front().data;
    EXPECT_EQ(heap->use().held, 60 * kMiB);
    EXPECT_EQ(resident(base, 60 * kMiB), 60 * kMiB);
    while (!blocks.empty()) {  // the last first, as a backward pass does
      elsewhere += kMiB / 4;
      heap->free(blocks.back().data, kMiB);
      blocks.pop_back();
      const PageHeap::Use use = heap->use();
      ASSERT_LE(use.held + elsewhere, std::max(560 * kMiB, use.in_use + PageHeap::kIdle + elsewhere));
    }
    EXPECT_EQ(resident(base, 60 * kMiB), heap->use().held);
    EXPECT_GE(heap->use().held, 9 * kMiB);  // of what gradients have left
    elsewhere = 500 * kMiB;
  }
  const std::byte* base = heap->allocate(kMiB);
  heap->free(const_cast<std::byte*>(base), kMiB);
  heap->trim();
  EXPECT_EQ(heap->use().held, 0);
  EXPECT_EQ(resident(base, 60 * kMiB), 0);
  const Block again{heap->allocate(40 * kMiB), 40 * kMiB, 3};
  EXPECT_EQ(again.data, base);
  again.write();
  EXPECT_TRUE(again.intact());
  elsewhere += 100 * kMiB;  // as much as the height and more
  heap->free(again.data, again.bytes);
  EXPECT_LE(heap->use().held, PageHeap::kIdle);
}

TEST(PageHeap, MeasuresTheProcessByItself) {
  const auto heap = PageHeap::reserve(256 * kMiB);
  std::vector<Block> blocks;
  for (int i = 0; i < 60; ++i) {
    blocks.push_back({heap->allocate(kMiB), kMiB, 1});
    blocks.back().write();
  }
  for (const Block& block : blocks) heap->free(block.data, block.bytes);
  EXPECT_GE(heap->use().held, 16 * kMiB);
  const std::vector<char> gradients(80 * kMiB, 1);
  heap->free(heap->allocate(kMiB), kMiB);
  EXPECT_LE(heap->use().held, PageHeap::kIdle + PageHeap::kPage);
}

TEST(PageHeap, ForgetsAHeightThatDoesNotComeAgain) {
  int64_t elsewhere = 1000 * kMiB;  // a model as it is made
  const auto heap = PageHeap::reserve(256 * kMiB, [&] { return elsewhere; });
  heap->free(heap->allocate(50 * kMiB), 50 * kMiB);
  elsewhere = 100 * kMiB;
  heap->free(heap->allocate(50 * kMiB), 50 * kMiB);
  EXPECT_GE(heap->use().held, 40 * kMiB);
  for (int i = 0; i < 1000; ++i) heap->free(heap->allocate(kMiB), kMiB);
  EXPECT_LE(heap->use().held, PageHeap::kIdle + PageHeap::kPage);
}

TEST(PageHeap, PagesBetweenBlocksGoAsSoonAsTheyCan) {
  int64_t elsewhere = 0;
  const auto heap = PageHeap::reserve(512 * kMiB, [&] { return elsewhere; });
  std::vector<Block> small, large;
  for (int i = 0; i < 40; ++i) {  // of every 4 MiB the first 64 KiB stay
    small.push_back({heap->allocate(64 << 10), 64 << 10, static_cast<unsigned char>(i)});
    large.push_back({heap->allocate(4 * kMiB - (64 << 10)), 4 * kMiB - (64 << 10), 9});
    small.back().write();
    large.back().write();
  }
  for (const Block& block : large) heap->free(block.data, block.bytes);
  elsewhere = 300 * kMiB;
  heap->free(heap->allocate(kMiB), kMiB);
  for (const Block& block : small) EXPECT_TRUE(block.intact());
  // A page of each pair cannot go, the other did but for kIdle.
  EXPECT_GE(heap->use().held, 40 * PageHeap::kPage);
  EXPECT_LE(heap->use().held, 40 * PageHeap::kPage + PageHeap::kIdle + PageHeap::kPage);
  for (const Block& block : small) heap->free(block.data, block.bytes);
  EXPECT_EQ(heap->use().in_use, 0);
  heap->trim();
  EXPECT_EQ(heap->use().held, 0);
  const std::byte* whole = heap->allocate(512 * kMiB);  // one piece again
  ASSERT_EQ(whole, small.front().data);
  heap->free(const_cast<std::byte*>(whole), 512 * kMiB);
}

TEST(PageHeap, AFullHeapSaysSoAndGoesOn) {
  const auto heap = PageHeap::reserve(8 * kMiB);
  std::byte* first = heap->allocate(6 * kMiB);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(heap->allocate(3 * kMiB), nullptr);
  EXPECT_EQ(heap->use().in_use, 6 * kMiB);
  heap->free(first, 6 * kMiB);
  first = heap->allocate(8 * kMiB);
  EXPECT_NE(first, nullptr);
  heap->free(first, 8 * kMiB);
}

// In a child, whose limits are its own. Its exit code is what `body` returns.
int in_child(int (*body)()) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(PageHeap, TakesFewerAddressesWhereTheyAreLimited) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need addresses of their own";
#endif
  EXPECT_EQ(in_child([] {
              std::FILE* statm = std::fopen("/proc/self/statm", "r");
              long pages = 0;
              if (statm == nullptr || std::fscanf(statm, "%ld", &pages) != 1) return 1;
              const rlim_t limit = static_cast<rlim_t>(pages) * 4096 + 300 * kMiB;
              const rlimit few{limit, limit};
              if (::setrlimit(RLIMIT_AS, &few) != 0) return 2;
              const auto heap = PageHeap::reserve(int64_t{1} << 40);
              if (heap == nullptr) return 3;
              std::byte* block = heap->allocate(100 * kMiB);
              if (block == nullptr) return 4;
              std::memset(block, 1, 100 * kMiB);
              if (heap->allocate(300 * kMiB) != nullptr) return 5;
              heap->free(block, 100 * kMiB);
              const auto second = PageHeap::reserve(int64_t{1} << 40);
              return second == nullptr || second->allocate(300 * kMiB) == nullptr ? 0 : 6;
            }),
            0);
}

class Tensors : public testing::Test {
 protected:
  void SetUp() override {
    heap_ = TensorHeap::install();
#ifdef __SANITIZE_ADDRESS__
    EXPECT_EQ(heap_, nullptr);
    GTEST_SKIP() << "the address sanitizer looks after malloc's blocks";
#endif
    ASSERT_NE(heap_, nullptr);
    heap_->switch_on(true);
    before_ = heap_->pages().use().in_use;
  }
  void TearDown() override {
    if (heap_ != nullptr) {
      EXPECT_EQ(in_use(), 0);
    }
  }
  int64_t in_use() const { return heap_->pages().use().in_use - before_; }

  TensorHeap* heap_ = nullptr;
  int64_t before_ = 0;
};

TEST_F(Tensors, LargeOnesLieInTheHeap) {
  EXPECT_EQ(TensorHeap::install(), heap_);
  EXPECT_EQ(TensorHeap::installed(), heap_);
  {
    const at::Tensor small = at::full({16, 16}, 2.f), none = at::empty({0});
    EXPECT_EQ(in_use(), 0);
    const at::Tensor large = at::full({512, 128}, 3.f);
    EXPECT_GE(in_use(), static_cast<int64_t>(large.nbytes()));
    EXPECT_LE(in_use(), static_cast<int64_t>(large.nbytes()) + 2 * PageHeap::kAlignment);
    for (const at::Tensor& t : {small, large}) EXPECT_EQ(reinterpret_cast<uintptr_t>(t.data_ptr()) % 64, 0u);
    at::Tensor grown = large.clone();
    grown.resize_({1024, 512});  // keeps what was there
    EXPECT_EQ(grown.flatten().narrow(0, 0, 512 * 128).sum().item<float>(), 3.f * 512 * 128);
    EXPECT_EQ(small.sum().item<float>(), 512.f);
  }
}

TEST_F(Tensors, SwitchedOffTheyDoNot) {
  const at::Tensor before = at::full({512, 128}, 3.f);
  const int64_t used = in_use();
  heap_->switch_on(false);
  EXPECT_FALSE(heap_->is_on());
  const at::Tensor after = before.clone();
  EXPECT_EQ(in_use(), used);
  EXPECT_EQ(after.sum().item<float>(), 3.f * 512 * 128);
  heap_->switch_on(true);
  const at::Tensor again = before.clone();
  EXPECT_GE(in_use(), 2 * static_cast<int64_t>(again.nbytes()));
}

TEST_F(Tensors, RawMemoryComesBackOfEitherKind) {
  c10::Allocator* allocator = c10::GetCPUAllocator();
  for (size_t bytes : {size_t{1}, size_t{1000}, TensorHeap::kLarge, size_t{3} << 20}) {
    void* data = allocator->raw_allocate(bytes);
    std::memset(data, 5, bytes);
    EXPECT_EQ(in_use() > 0, bytes >= TensorHeap::kLarge);
    const c10::DataPtr copy = allocator->clone(data, bytes);
    EXPECT_EQ(std::memcmp(copy.get(), data, bytes), 0);
    allocator->raw_deallocate(data);
  }
}

TEST_F(Tensors, WhatNoMemoryCanHoldIsTorchsOwnError) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer ends a program that asks for so much";
#endif
  EXPECT_THROW(at::empty({int64_t{1} << 50}), c10::Error);
  const at::Tensor fine = at::full({1 << 20}, 1.f);
  EXPECT_EQ(fine.sum().item<float>(), 1 << 20);
}

TEST_F(Tensors, AChildOfAForkMakesThemToo) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the thread sanitizer follows no child of several threads";
#endif
  std::atomic<bool> on{true};
  std::thread busy([&] {
    while (on) at::empty({1 << 16});
  });
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(in_child([] {
                ::alarm(20);
                at::Tensor t = at::empty({1 << 18});
                std::memset(t.mutable_data_ptr(), 0, t.nbytes());
                return static_cast<int>(t.const_data_ptr<float>()[77]);
              }),
              0);
  }
  on = false;
  busy.join();
}

}  // namespace
}  // namespace dovetail

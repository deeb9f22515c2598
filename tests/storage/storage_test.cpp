#include <ATen/ops/arange.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/storage/pool.h"
#include "dovetail/storage/views.h"

namespace dovetail {
namespace {

TEST(Memory, IsZeroAndCounted) {
  HostAllocator host;
  Ledger ledger;
  {
    Buffer a(host, ledger, 1000, Role::main), b(host, ledger, 0, Role::main);
    for (int i = 0; i < 1000; ++i) ASSERT_EQ(a.data()[i], std::byte{0});
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
    EXPECT_EQ(b.data(), nullptr);
    Buffer c = std::move(a);
    EXPECT_EQ(ledger.held(Role::main), 1000);
  }
  EXPECT_EQ(ledger.held(), 0);
}

int64_t resident_pages(const Buffer& buffer) {
  std::vector<unsigned char> pages((buffer.bytes() + 4095) / 4096);
  EXPECT_EQ(::mincore(buffer.data(), buffer.bytes(), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; });
}

TEST(Memory, ZeroTakesNoneUntilWritten) {
  HostAllocator host;
  Ledger ledger;
  Buffer a(host, ledger, int64_t{8} << 20, Role::gradient), none;
  std::memset(a.data(), 7, a.bytes());
  EXPECT_EQ(resident_pages(a), a.bytes() / 4096);
  a.zero();
  none.zero();
  EXPECT_EQ(resident_pages(a), 0);
  std::memset(a.data(), 7, a.bytes());
  a.zero(a.data() + 100, a.bytes() - 200);  // whole pages go, the rest of the edges is overwritten
  EXPECT_EQ(resident_pages(a), 2);
  EXPECT_EQ(a.data()[99], std::byte{7});
  EXPECT_EQ(a.data()[100], std::byte{0});
  EXPECT_EQ(a.data()[a.bytes() - 101], std::byte{0});
  EXPECT_EQ(a.data()[a.bytes() - 100], std::byte{7});
  EXPECT_EQ(ledger.held(Role::gradient), a.bytes());
  std::memset(a.data(), 7, a.bytes());
  EXPECT_EQ(a.data()[a.bytes() - 1], std::byte{7});
}

TEST(Pool, SlotsAreReusedAndGrowOnlyWhenNeeded) {
  HostAllocator host;
  Ledger ledger;
  SlotPool pool(host, ledger, {4096, 8192});
  std::byte* small = nullptr;
  {
    auto a = pool.acquire(4000), b = pool.acquire(5000);
    small = a.data();
    EXPECT_EQ(ledger.held(Role::slot), 4096 + 8192);
    EXPECT_EQ(pool.in_use(), 2);
  }
  EXPECT_EQ(pool.acquire(100).data(), small);
  auto c = pool.acquire(8192);
  auto d = pool.acquire(10000);  // the free one is enlarged
  EXPECT_EQ(ledger.held(Role::slot), 8192 + 10000);
  auto e = pool.acquire(1);
  EXPECT_EQ(pool.sizes().size(), 3u);
  std::memset(d.data(), 1, 10000);
}

TEST(Pool, TrimGivesBackWhatNobodyNeeds) {
  HostAllocator host;
  Ledger ledger;
  SlotPool pool(host, ledger, {1 << 20, 1 << 20});
  auto kept = pool.acquire(1 << 20);
  std::memset(kept.data(), 1, kept.bytes());
  std::byte* data = nullptr;
  {
    auto freed = pool.acquire(1 << 20);
    std::memset(data = freed.data(), 1, freed.bytes());
  }
  pool.trim(100'000);
  EXPECT_EQ(data[99'999], std::byte{1});
  EXPECT_EQ(data[100'000], std::byte{0});
  EXPECT_EQ(kept.data()[kept.bytes() - 1], std::byte{1});  // in use
  EXPECT_EQ(ledger.held(Role::slot), 2 << 20);
  data[200'000] = std::byte{1};  // not asked for since: nothing to give back
  pool.trim(100'000);
  EXPECT_EQ(data[200'000], std::byte{1});
}

TEST(Pool, TrimKeepsTheSlotsThatServeNext) {
  HostAllocator host;
  Ledger ledger;
  SlotPool pool(host, ledger, {2 << 20, 1 << 20, 1 << 20, 65536});
  std::vector<std::byte*> data;
  {
    std::vector<SlotPool::Slot> all;
    for (int64_t bytes : {2 << 20, 1 << 20, 1 << 20, 65536}) all.push_back(pool.acquire(bytes));
    for (auto& slot : all) std::memset(slot.data(), 1, slot.bytes()), data.push_back(slot.data());
  }
  pool.trim(100'000, 1);
  auto next = pool.acquire(100'000);
  EXPECT_EQ(next.data(), data[1]);
  EXPECT_EQ(data[1][99'999], std::byte{1});
  EXPECT_EQ(data[1][100'000], std::byte{0});
  EXPECT_EQ(data[0][0], std::byte{0});
  EXPECT_EQ(data[2][0], std::byte{0});
  EXPECT_EQ(data[3][0], std::byte{1});  // for smaller ones
}

TEST(Pool, GoesBackToItsPlannedSizes) {
  HostAllocator host;
  Ledger ledger;
  SlotPool pool(host, ledger, {4096});
  {
    auto a = pool.acquire(8000), b = pool.acquire(100);
    EXPECT_EQ(ledger.held(Role::slot), 8000 + 100);
    EXPECT_THROW(pool.restore(), InvariantError);
  }
  pool.restore();
  EXPECT_EQ(pool.sizes(), std::vector<int64_t>{4096});
  EXPECT_EQ(ledger.held(Role::slot), 4096);
  auto c = pool.acquire(4096);
  std::memset(c.data(), 1, 4096);
}

TEST(BindableStorage, TouchingUnboundNamesTheUnitAndKeepsVersions) {
  BindableStorage storage(64, "parameters of unit layers.3 are not gathered");
  at::Tensor w = storage.view(16, {3, 2}, DType::f32);
  EXPECT_EQ(w.storage_offset(), 4);
  const auto version = w._version();
  try {
    (void)w.sum();
    FAIL();
  } catch (const std::exception& e) {
    EXPECT_NE(std::string(e.what()).find("layers.3"), std::string::npos) << e.what();
  }
  std::vector<float> bytes(16);
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<float>(i);
  storage.bind(reinterpret_cast<std::byte*>(bytes.data()));
  EXPECT_EQ(w.sum().item<float>(), 4 + 5 + 6 + 7 + 8 + 9);
  EXPECT_EQ(w.data_ptr(), bytes.data() + 4);
  storage.unbind();
  EXPECT_ANY_THROW((void)w.sum());
  EXPECT_EQ(w._version(), version);
}

TEST(BindableStorage, BackwardSeesTheBytesBoundThen) {
  BindableStorage storage(16, "unbound");
  at::Tensor w = storage.view(0, {4}, DType::f32).set_requires_grad(true);
  std::vector<float> a{1, 2, 3, 4}, b{1, 2, 3, 4};
  storage.bind(reinterpret_cast<std::byte*>(a.data()));
  at::Tensor x = at::arange(4, at::kFloat).set_requires_grad(true);
  at::Tensor y = (w * x).sum();
  storage.unbind();
  std::fill(a.begin(), a.end(), -1.f);
  storage.bind(reinterpret_cast<std::byte*>(b.data()));
  y.backward();
  EXPECT_TRUE(x.grad().equal(w.detach()));
}

TEST(Views, NodesOfATreeAreViewsOfOneAllocation) {
  HostAllocator host;
  Ledger ledger;
  Buffer buffer(host, ledger, 4 * 24, Role::runtime);
  DataTree tree("runtime", 96);
  const int64_t qkv = tree.add_contiguous(0, "qkv", 0, {6, 4}, DType::f32);
  const int64_t head = tree.add_contiguous(qkv, "head.1", 32, {2, 4}, DType::f32);
  DataNode columns{"columns.1", 8, {6, 2}, {4, 1}, DType::f32, -1};
  const int64_t column_head = tree.add(qkv, columns);
  at::Tensor whole = tensor_of(tree, qkv, buffer.memory());
  whole.copy_(at::arange(24, at::kFloat).view({6, 4}));
  EXPECT_EQ(tensor_of(tree, head, buffer.memory()).data_ptr(), static_cast<float*>(whole.data_ptr()) + 8);
  EXPECT_TRUE(tensor_of(tree, column_head, buffer.memory()).equal(whole.slice(1, 2, 4)));
}

}  // namespace
}  // namespace dovetail

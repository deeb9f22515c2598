#include "dovetail/storage/tensor_heap.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <unistd.h>

#include <cstring>
#include <limits>

namespace dovetail {
namespace {

// In front of every tensor: where its memory came from.
struct alignas(PageHeap::kAlignment) Header {
  PageHeap* pages;  // null: torch's own allocation
  int64_t bytes;    // with the header
};
static_assert(sizeof(Header) == PageHeap::kAlignment);

void release(void* data) {
  if (data == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  auto* header = static_cast<Header*>(data) - 1;
  if (header->pages == nullptr)
    c10::free_cpu(header);
  else
    header->pages->free(reinterpret_cast<std::byte*>(header), header->bytes);
}

// More than the machine has, since pieces of a heap that is nearly full seldom fit.
int64_t room_wanted() { return 2 * static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE); }

void before_fork() {
  if (TensorHeap* heap = TensorHeap::installed()) heap->pages().lock();
}

void after_fork() {
  if (TensorHeap* heap = TensorHeap::installed()) heap->pages().unlock();
}

}  // namespace

TensorHeap* TensorHeap::installed() { return dynamic_cast<TensorHeap*>(c10::GetCPUAllocator()); }

TensorHeap* TensorHeap::install() {
#ifdef __SANITIZE_ADDRESS__
  return nullptr;
#endif
  if (TensorHeap* heap = installed()) return heap;
  std::unique_ptr<PageHeap> pages = PageHeap::reserve(room_wanted());
  if (pages == nullptr) return nullptr;
  auto* heap = new TensorHeap(std::move(pages));  // tensors may outlive everything, so it is never deleted
  c10::SetCPUAllocator(heap, std::numeric_limits<uint8_t>::max());
  ::pthread_atfork(before_fork, after_fork, after_fork);
  return heap;
}

void TensorHeap::switch_on(bool on) {
  on_ = on;
  if (!on) pages_->trim();
}

c10::DataPtr TensorHeap::allocate(size_t bytes) {
  const c10::Device cpu(c10::DeviceType::CPU);
  if (bytes == 0) return {nullptr, nullptr, &release, cpu};
  const size_t whole = bytes + sizeof(Header);
  Header* header = nullptr;
  if (on_ && bytes >= kLarge && whole > bytes) {
    header = reinterpret_cast<Header*>(pages_->allocate(static_cast<int64_t>(whole)));
    if (header != nullptr) *header = {pages_.get(), static_cast<int64_t>(whole)};
  }
  if (header == nullptr) {
    header = static_cast<Header*>(c10::alloc_cpu(whole));  // throws torch's own error
    *header = {nullptr, static_cast<int64_t>(whole)};
  }
  void* data = header + 1;
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return {data, data, &release, cpu};
}

c10::DeleterFnPtr TensorHeap::raw_deleter() const { return &release; }

void TensorHeap::copy_data(void* to, const void* from, size_t bytes) const { default_copy_data(to, from, bytes); }

}  // namespace dovetail

#include "dovetail/storage/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/base/pages.h"

namespace dovetail {

Memory HostAllocator::allocate(int64_t bytes, Role role) {
  DT_CHECK_GE(bytes, int64_t{0});
  if (bytes == 0) return {};
  const size_t mapped = static_cast<size_t>(round_up(bytes, kPageBytes));
  void* p = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    raise<StateError>("storage: no memory for {} bytes of {}: {}", bytes, name_of(role), std::strerror(errno));
  // Advice only: without huge pages all is the same.
  if (mapped >= size_t{kHugePageBytes}) ::madvise(p, mapped, huge_pages_ ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::shared_ptr<void> owner(p, [mapped](void* q) { ::munmap(q, mapped); });
  return {std::move(owner), static_cast<std::byte*>(p), bytes};
}

void HostAllocator::zero(std::byte* data, int64_t bytes) noexcept {
  zero_pages(data, bytes, [](std::byte* pages, int64_t n) {
    return ::madvise(pages, static_cast<size_t>(n), MADV_DONTNEED) == 0;
  });
}

Buffer::Buffer(Allocator& allocator, Ledger& ledger, int64_t bytes, Role role)
    : memory_(allocator.allocate(bytes, role)), allocator_(&allocator), ledger_(&ledger), counted_(bytes), role_(role) {
  ledger.hold(role, bytes);
}

Buffer::Buffer(Memory memory, Allocator& allocator, Ledger& ledger, int64_t share, Role role)
    : memory_(std::move(memory)), allocator_(&allocator), ledger_(&ledger), counted_(share), role_(role) {
  ledger.hold(role, share);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    memory_ = std::exchange(other.memory_, {});
    allocator_ = std::exchange(other.allocator_, nullptr);
    ledger_ = std::exchange(other.ledger_, nullptr);
    counted_ = other.counted_;
    role_ = other.role_;
  }
  return *this;
}

void Buffer::reset() {
  if (ledger_) ledger_->release(role_, counted_);
  ledger_ = nullptr;
  allocator_ = nullptr;
  memory_ = {};
}

void Buffer::zero(std::byte* data, int64_t bytes) noexcept {
  if (bytes > 0) allocator_->zero(data, bytes);
}

}  // namespace dovetail

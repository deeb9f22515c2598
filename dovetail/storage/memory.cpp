#include "dovetail/storage/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail {

Memory HostAllocator::allocate(int64_t bytes, Role role) {
  DT_CHECK_GE(bytes, int64_t{0});
  if (bytes == 0) return {};
  const size_t mapped = static_cast<size_t>(round_up(bytes, 4096));
  void* p = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED)
    raise<StateError>("storage: no memory for {} bytes of {}: {}", bytes, name_of(role), std::strerror(errno));
  std::shared_ptr<void> owner(p, [mapped](void* q) { ::munmap(q, mapped); });
  return {std::move(owner), static_cast<std::byte*>(p), bytes};
}

Buffer::Buffer(Allocator& allocator, Ledger& ledger, int64_t bytes, Role role)
    : memory_(allocator.allocate(bytes, role)), ledger_(&ledger), role_(role) {
  ledger.hold(role, bytes);
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    memory_ = std::exchange(other.memory_, {});
    ledger_ = std::exchange(other.ledger_, nullptr);
    role_ = other.role_;
  }
  return *this;
}

void Buffer::reset() {
  if (ledger_) ledger_->release(role_, memory_.bytes);
  ledger_ = nullptr;
  memory_ = {};
}

}  // namespace dovetail

#include "dovetail/storage/page_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"

namespace dovetail {
namespace {

// Addresses become usable in steps, so that memory is committed as it is needed where the system counts commitments.
constexpr int64_t kStep = 32 * PageHeap::kPage;

constexpr int64_t kMeasured = int64_t{256} << 10;  // blocks worth a look at the process's memory

// The process's own memory as /proc/self/statm has it; 0 where the system does not say. Without shared pages: of those
// other ranks have a share.
int64_t private_bytes(int statm) {
  char text[96] = {};
  long long whole = 0, resident = 0, shared = 0;
  if (::pread(statm, text, sizeof text - 1, 0) <= 0) return 0;
  if (std::sscanf(text, "%lld %lld %lld", &whole, &resident, &shared) != 3) return 0;
  return (resident - shared) * ::sysconf(_SC_PAGESIZE);
}

void* map_addresses(int64_t bytes) {
  return ::mmap(nullptr, static_cast<size_t>(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

}  // namespace

std::unique_ptr<PageHeap> PageHeap::reserve(int64_t room, std::function<int64_t()> elsewhere) {
  DT_CHECK_LT(int64_t{0}, room);
  for (room = round_up(room, kPage); room >= kPage; room = round_down(room / 2, kPage)) {
    // A page more, to begin at a multiple of a page.
    void* p = map_addresses(room + kPage);
    if (p == MAP_FAILED) continue;
    const auto before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(p) % kPage);
    auto* base = static_cast<std::byte*>(p) + before;
    if (before > 0) ::munmap(p, static_cast<size_t>(before));
    if (before < kPage) ::munmap(base + room, static_cast<size_t>(kPage - before));
    return std::unique_ptr<PageHeap>(new PageHeap(base, room, std::move(elsewhere)));
  }
  return nullptr;
}

PageHeap::PageHeap(std::byte* base, int64_t room, std::function<int64_t()> elsewhere)
    : base_(base),
      room_(room),
      elsewhere_(std::move(elsewhere)),
      statm_(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC)),
      free_(0, room),
      held_pages_(static_cast<size_t>(room / kPage)) {}

PageHeap::~PageHeap() {
  ::munmap(base_, static_cast<size_t>(room_));
  if (statm_ >= 0) ::close(statm_);
}

std::byte* PageHeap::allocate(int64_t bytes) {
  DT_CHECK_LT(int64_t{0}, bytes);
  const int64_t size = round_up(bytes, kAlignment);
  const std::lock_guard lock(mutex_);
  const auto offset = free_.take(size);
  if (!offset) return nullptr;
  if (!open(*offset + size)) {
    free_.give(*offset, size);
    return nullptr;
  }
  hold(*offset, *offset + size);
  use_.in_use += size;
  use_.most_in_use = std::max(use_.most_in_use, use_.in_use);
  count(size);
  return base_ + *offset;
}

void PageHeap::free(std::byte* block, int64_t bytes) {
  const int64_t size = round_up(bytes, kAlignment);
  const std::lock_guard lock(mutex_);
  free_.give(block - base_, size);
  use_.in_use -= size;
  if (use_.held - use_.in_use <= most_idle_ || size < kMeasured) return;
  const int64_t needed = measure() + use_.in_use;
  // A third of what is left below the height: shared memory, which is not in it, grows and falls by itself.
  const int64_t idle = std::max(kIdle, (std::max(height_, height_before_) - needed) / 3);
  const int64_t most = use_.in_use + idle;
  if (use_.held > most) shrink(most - kIdle / 2);
}

void PageHeap::count(int64_t bytes) {
  asked_ += bytes;
  most_in_window_ = std::max(most_in_window_, use_.in_use);
  if (asked_ > kWindow * std::max(most_in_window_, kIdle)) {
    height_before_ = std::exchange(height_, 0);
    asked_ = most_in_window_ = 0;
  }
  if (bytes >= kMeasured) measure();
}

int64_t PageHeap::measure() {
  const int64_t elsewhere = elsewhere_ ? elsewhere_() : std::max<int64_t>(private_bytes(statm_) - use_.held, 0);
  height_ = std::max(height_, elsewhere + use_.in_use);
  return elsewhere;
}

void PageHeap::trim() {
  const std::lock_guard lock(mutex_);
  shrink(0);
  height_ = height_before_ = 0;
}

PageHeap::Use PageHeap::use() const {
  const std::lock_guard lock(mutex_);
  return use_;
}

bool PageHeap::open(int64_t end) {
  if (end <= opened_) return true;
  const int64_t until = std::min(round_up(end, kStep), room_);
  const auto bytes = static_cast<size_t>(until - opened_);
  if (::mprotect(base_ + opened_, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  ::madvise(base_ + opened_, bytes, MADV_HUGEPAGE);  // advice only: without huge pages all is the same
  opened_ = until;
  return true;
}

void PageHeap::hold(int64_t begin, int64_t end) {
  for (int64_t page = begin / kPage; page < ceil_div(end, kPage); ++page) {
    if (held_pages_[page]) continue;
    held_pages_[page] = true;
    use_.held += kPage;
  }
}

void PageHeap::shrink(int64_t most) {
  const auto& pieces = free_.pieces();
  for (auto piece = pieces.rbegin(); piece != pieces.rend() && use_.held > most; ++piece) {
    const int64_t first = ceil_div(piece->first, kPage);
    const int64_t end = std::min(piece->first + piece->second, opened_) / kPage;
    for (int64_t page = end; page-- > first && use_.held > most;) {
      if (!held_pages_[page]) continue;
      if (::madvise(base_ + page * kPage, kPage, MADV_DONTNEED) != 0) continue;
      held_pages_[page] = false;
      use_.held -= kPage;
    }
  }
  // What lies between blocks cannot go; looking for it at every block that comes back would be in vain.
  most_idle_ = use_.held > most ? std::max(kIdle, use_.held - use_.in_use + kIdle / 2) : kIdle;
}

}  // namespace dovetail

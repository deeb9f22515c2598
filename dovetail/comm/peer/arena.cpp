#include "dovetail/comm/peer/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/base/math.h"
#include "dovetail/base/pages.h"

namespace dovetail::comm {
namespace {

// At the start of a region, a page before its bytes.
struct RegionHeader {
  std::atomic<int32_t> users;  // kGivenBack once the last one has freed the pages
};
constexpr int32_t kGivenBack = -1;

RegionHeader& header_of(std::byte* region) { return *reinterpret_cast<RegionHeader*>(region - kPageBytes); }

std::byte* map(int file, int64_t capacity) {
  void* p = ::mmap(nullptr, static_cast<size_t>(capacity), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (p == MAP_FAILED) return nullptr;
  // A core dump reads every page, and so takes memory for all of a file that is mostly holes.
  ::madvise(p, static_cast<size_t>(capacity), MADV_DONTDUMP);
  return static_cast<std::byte*>(p);
}

}  // namespace

Arena::Arena(int file, std::byte* base, int64_t capacity, int64_t reserved)
    : file_(file), base_(base), capacity_(capacity), free_(reserved, capacity) {}

std::shared_ptr<Arena> Arena::create(int64_t capacity, int64_t reserved) {
  capacity = round_up(capacity, kPageBytes);
  reserved = round_up(reserved, kPageBytes);
  // Beyond this limit the kernel ends the process with a signal instead of an error.
  rlimit files{};
  if (::getrlimit(RLIMIT_FSIZE, &files) == 0 && files.rlim_cur != RLIM_INFINITY &&
      files.rlim_cur < static_cast<rlim_t>(capacity))
    throw CommError(-1, fmt::format("peer memory: wanted files of {} bytes, the limit (ulimit -f) is {} bytes",
                                    capacity, files.rlim_cur));
  const int file = ::memfd_create("dovetail", MFD_CLOEXEC);
  if (file < 0) throw CommError(-1, fmt::format("peer memory: memfd_create: {}", std::strerror(errno)));
  std::byte* base = ::ftruncate(file, capacity) == 0 ? map(file, capacity) : nullptr;
  if (base == nullptr) {
    const int error = errno;
    ::close(file);
    throw CommError(-1, fmt::format("peer memory: no address space of {} bytes: {}", capacity, std::strerror(error)));
  }
  return std::shared_ptr<Arena>(new Arena(file, base, capacity, reserved));
}

std::shared_ptr<Arena> Arena::open(const ArenaHandle& h) {
  const std::string path = fmt::format("/proc/{}/fd/{}", h.process, h.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat seen{};
  const bool same = file >= 0 && ::fstat(file, &seen) == 0 && seen.st_dev == h.device && seen.st_ino == h.inode;
  std::byte* base = same ? map(file, h.capacity) : nullptr;
  const int error = errno;
  if (base == nullptr) {
    if (file >= 0) ::close(file);
    const char* why = file >= 0 && !same ? "it is another file" : std::strerror(error);
    throw CommError(-1, fmt::format("peer memory of process {}: wanted to map {}: {}", h.process, path, why));
  }
  return std::shared_ptr<Arena>(new Arena(file, base, h.capacity, h.capacity));
}

Arena::~Arena() {
  ::close(file_);
  ::munmap(base_, static_cast<size_t>(capacity_));
}

ArenaHandle Arena::handle() const {
  struct stat seen{};
  DT_CHECK(::fstat(file_, &seen) == 0, "{}", std::strerror(errno));
  ArenaHandle h;
  h.process = ::getpid();
  h.file = file_;
  h.device = seen.st_dev;
  h.inode = seen.st_ino;
  h.capacity = capacity_;
  return h;
}

int64_t Arena::take(int64_t bytes) {
  if (const std::optional<int64_t> offset = free_.take(bytes)) return *offset;
  raise<StateError>("peer memory: wanted {} bytes, got no room in an arena of {}", bytes, capacity_);
}

// Frees the pages for every process; they read as zero when touched again.
bool Arena::punch(std::byte* data, int64_t bytes) noexcept {
  return ::madvise(data, static_cast<size_t>(bytes), MADV_REMOVE) == 0;
}

void Arena::zero(std::byte* data, int64_t bytes) noexcept {
  zero_pages(data, bytes, [this](std::byte* pages, int64_t n) { return punch(pages, n); });
}

std::vector<Interval> Arena::written(int64_t offset, int64_t bytes) const {
  std::vector<Interval> runs;
  const int64_t end = offset + bytes;
  for (int64_t at = offset; at < end;) {
    const int64_t data = ::lseek(file_, at, SEEK_DATA);
    if (data < 0 && errno == ENXIO) break;  // nothing more
    const int64_t hole = data < 0 ? -1 : ::lseek(file_, data, SEEK_HOLE);
    if (hole < 0) return {{0, bytes}};
    if (data >= end) break;
    runs.push_back({data - offset, std::min(hole, end) - offset});
    at = hole;
  }
  return runs;
}

std::shared_ptr<std::byte> Arena::allocate(int64_t bytes) {
  if (bytes == 0) return nullptr;
  const int64_t size = round_up(bytes, kPageBytes), offset = take(size);
  return {base_ + offset, [self = shared_from_this(), offset, size](std::byte* data) {
            self->punch(data, size);
            self->free_.give(offset, size);
          }};
}

std::byte* Arena::allocate_region(int64_t bytes, int users) {
  reclaim_regions();
  const int64_t size = kPageBytes + round_up(bytes, kPageBytes), offset = take(size);
  regions_.push_back({offset, size});
  std::byte* region = base_ + offset + kPageBytes;
  header_of(region).users.store(users, std::memory_order_release);
  return region;
}

void Arena::release_region(Arena& owner, std::byte* region, int64_t bytes) noexcept {
  RegionHeader& header = header_of(region);
  if (header.users.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
  owner.punch(region, round_up(bytes, kPageBytes));
  header.users.store(kGivenBack, std::memory_order_release);
}

void Arena::reclaim_regions() {
  std::erase_if(regions_, [&](const Region& r) {
    if (header_of(base_ + r.offset + kPageBytes).users.load(std::memory_order_acquire) != kGivenBack) return false;
    punch(base_ + r.offset, r.bytes);
    free_.give(r.offset, r.bytes);
    return true;
  });
}

uint64_t host_fingerprint() {
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::string text{std::istreambuf_iterator<char>(boot), {}};
  char names[64] = {};
  if (::readlink("/proc/self/ns/pid", names, sizeof(names) - 1) > 0) text += names;
  return hash64(std::as_bytes(std::span(text)));
}

}  // namespace dovetail::comm

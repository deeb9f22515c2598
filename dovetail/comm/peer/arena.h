// Memory of one rank that the other ranks of its host address in place: a memfd, which is not limited by /dev/shm, has
// no name that could be left over, and is gone with the last process that maps it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/base/first_fit.h"
#include "dovetail/comm/group.h"

namespace dovetail::comm {

// How a rank offers its arena to another; plain bytes.
struct ArenaHandle {
  uint64_t host = 0;            // equal on two ranks only where they can open one another's
  int64_t process = 0;
  int64_t file = -1;            // descriptor in that process
  uint64_t device = 0, inode = 0;
  int64_t capacity = 0;
  uint64_t shared = 0;          // address of a std::shared_ptr<Arena>, for threads of that process
};

// The mapping. The rank that created it allocates from it (SharedMemory); others only read and write where they were
// told. Used by one thread at a time but for what lies in the memory itself.
class Arena final : public SharedMemory, public std::enable_shared_from_this<Arena> {
 public:
  // `capacity` bytes of address space whose pages count once touched; the first `reserved` are not given out.
  // Throws CommError where the system refuses.
  static std::shared_ptr<Arena> create(int64_t capacity, int64_t reserved);
  // Another rank's. Throws CommError naming the process.
  static std::shared_ptr<Arena> open(const ArenaHandle& handle);
  ~Arena() override;
  Arena(const Arena&) = delete;

  // `host` and `shared` are the caller's to fill in.
  ArenaHandle handle() const;

  std::byte* base() const { return base_; }
  bool holds(const void* p) const { return p >= base_ && p < base_ + capacity_; }

  std::shared_ptr<std::byte> allocate(int64_t bytes) override;
  void zero(std::byte* data, int64_t bytes) noexcept override;
  // The runs of [offset, offset + bytes) that were written since they were last zeroed or new, page by page; relative
  // to offset, ascending. Whether they lie in memory or were paged out.
  std::vector<Interval> written(int64_t offset, int64_t bytes) const;

  // A region that `users` ranks release with release_region(); its space is used again once all have.
  std::byte* allocate_region(int64_t bytes, int users);
  static void release_region(Arena& owner, std::byte* region, int64_t bytes) noexcept;

 private:
  Arena(int file, std::byte* base, int64_t capacity, int64_t reserved);
  int64_t take(int64_t bytes);  // offset of free address space
  void reclaim_regions();
  bool punch(std::byte* data, int64_t bytes) noexcept;

  const int file_;
  std::byte* const base_;
  const int64_t capacity_;
  FirstFit free_;
  struct Region {
    int64_t offset, bytes;
  };
  std::vector<Region> regions_;
};

// Equal on two processes that can see one another's memory files: one kernel, one process namespace.
uint64_t host_fingerprint();

}  // namespace dovetail::comm

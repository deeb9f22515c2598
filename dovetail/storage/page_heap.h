// Memory for large blocks that come and go in every training step, as activations do. Its pages are huge where the
// system has them. Those that no block lies in stay for the next ones, a third of what the process is below what it
// needed at its height lately: gradients, which take the place of activations as a backward pass goes, push them out.
// Lately: in this window and the one before, of so many bytes asked for as a step or two ask. A block is placed at the
// lowest address where it fits, which keeps the whole dense.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "dovetail/base/first_fit.h"
#include "dovetail/base/pages.h"

namespace dovetail {

class PageHeap {
 public:
  static constexpr int64_t kPage = kHugePageBytes;    // what memory is taken and given back in
  static constexpr int64_t kAlignment = 64;           // of blocks, bytes
  static constexpr int64_t kWindow = 8;               // times what is in use at once in it
  static constexpr int64_t kIdle = int64_t{8} << 20;  // bytes that may be held in any case and not in use

  // Addresses for `room` bytes (rounded up to pages), or for a half, a quarter, ... where there are not so many; null
  // where there is not even room for one page. `elsewhere`: bytes of memory that the process has outside of the heap,
  // not shared; empty: as the system says.
  static std::unique_ptr<PageHeap> reserve(int64_t room, std::function<int64_t()> elsewhere = {});
  // All blocks must have come back.
  ~PageHeap();
  PageHeap(const PageHeap&) = delete;
  PageHeap& operator=(const PageHeap&) = delete;

  // A block of `bytes` (positive), its contents undefined; null where no room or memory is left.
  std::byte* allocate(int64_t bytes);
  // What allocate() gave, with the same size.
  void free(std::byte* block, int64_t bytes);
  // Gives all pages back that no block lies in, and forgets the height.
  void trim();

  struct Use {
    int64_t in_use = 0;       // bytes in blocks
    int64_t held = 0;         // bytes of pages that blocks lie in or lay in
    int64_t most_in_use = 0;  // of in_use, so far
  };
  Use use() const;

  // For fork(): a child must not find the heap in the middle of a change.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  PageHeap(std::byte* base, int64_t room, std::function<int64_t()> elsewhere);
  int64_t measure();  // bytes elsewhere; what is needed now counts for the height
  void count(int64_t bytes);
  bool open(int64_t end);                  // makes addresses below `end` usable
  void hold(int64_t begin, int64_t end);   // counts the pages of a new block
  void shrink(int64_t most);               // gives free pages back, the highest first, until so much is held

  std::byte* const base_;
  const int64_t room_;
  const std::function<int64_t()> elsewhere_;
  const int statm_;  // a file; in a child of fork() its parent's
  mutable std::mutex mutex_;
  FirstFit free_;
  std::vector<bool> held_pages_;
  int64_t opened_ = 0;
  Use use_;
  int64_t asked_ = 0, most_in_window_ = 0;  // in this window, and in use at once
  int64_t height_ = 0, height_before_ = 0;  // the most bytes elsewhere and in use at once, in this window and the last
  int64_t most_idle_ = kIdle;  // up to it nothing is to be done
};

}  // namespace dovetail

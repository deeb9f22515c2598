// The slots that gather and gradient buffers are taken from in turn. Which slot serves a request is
// SlotPolicy's choice, so the planner knows the sizes beforehand; a slot is enlarged or added only
// where a step departs from the plan.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "dovetail/layout/slot_policy.h"
#include "dovetail/storage/memory.h"

namespace dovetail {

class SlotPool {
 public:
  SlotPool(Allocator& allocator, Ledger& ledger, const std::vector<int64_t>& sizes);

  // A slot in use; gives itself back when destroyed. Must not outlive the pool.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { reset(); }
    explicit operator bool() const { return pool_ != nullptr; }
    std::byte* data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    // Zeroes bytes of it (Buffer::zero).
    void zero(std::byte* data, int64_t bytes) noexcept { pool_->buffers_[number_].zero(data, bytes); }
    void reset();

   private:
    friend class SlotPool;
    SlotPool* pool_ = nullptr;
    int64_t number_ = 0;
    std::byte* data_ = nullptr;
    int64_t bytes_ = 0;
  };

  // Contents are whatever the slot's last user left.
  Slot acquire(int64_t bytes);
  // Back to the slots it was made with, after slots were enlarged or added. No slot may be in use; contents are lost.
  void restore();
  // The rest of the step needs no slot beyond so many bytes, and of free ones that large no more than `slots` at once
  // (those that acquire() would choose): other pages of free slots are given back.
  void trim(int64_t bytes, int64_t slots = std::numeric_limits<int64_t>::max());
  int64_t in_use() const { return policy_.in_use_count(); }
  const std::vector<int64_t>& sizes() const { return policy_.sizes(); }

 private:
  Allocator& allocator_;
  Ledger& ledger_;
  const std::vector<int64_t> planned_;
  SlotPolicy policy_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> touched_;  // per slot: bytes that may have pages
};

}  // namespace dovetail

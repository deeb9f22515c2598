#include "dovetail/engine/gather_slots.h"

#include <bit>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/base/math.h"
#include "dovetail/base/pages.h"

namespace dovetail::engine_detail {

GatherSlots::GatherSlots(comm::Group& ranks, Allocator& allocator, int64_t whole, std::vector<Interval> own, int count,
                         const comm::Identity& id)
    : ranks_(ranks),
      allocator_(allocator),
      own_(std::move(own)),
      count_(count),
      stride_(round_up(whole, kPageBytes)),
      memory_(ranks.allocate_together(count * stride_ + ranks.size() * static_cast<int64_t>(sizeof(Published)), id)),
      free_((uint64_t{1} << count) - 1),
      times_(count),
      has_pages_(count) {
  DT_CHECK(count > 0 && count <= kMost, "{} slots", count);
}

GatherSlots::Published& GatherSlots::of(int member) const {
  return reinterpret_cast<Published*>(memory_.get() + count_ * stride_)[member];
}

int GatherSlots::take(ShardGroup* group) {
  uint64_t free = free_;
  if (gathers_ > 0) {
    free = ~uint64_t{0};
    for (int m = 0; m < ranks_.size(); ++m) free &= of(m).free[(gathers_ - 1) % 2].load(std::memory_order_acquire);
  }
  const int slot = free == 0 ? kNone : std::countr_zero(free);
  if (slot != kNone) {
    free_ &= ~(uint64_t{1} << slot);
    ++times_[slot];
    has_pages_[slot] = true;
  }
  // Another rank may be as far as this gather, but not beyond: what it has published with the last one stays till then.
  of(ranks_.rank()).free[gathers_ % 2].store(free_, std::memory_order_release);
  ++gathers_;
  last_ = group;
  return slot;
}

void GatherSlots::give(int slot) {
  free_ |= uint64_t{1} << slot;
  of(ranks_.rank()).given[slot].store(times_[slot], std::memory_order_release);
}

bool GatherSlots::is_read(int slot) const {
  for (int m = 0; m < ranks_.size(); ++m)
    if (of(m).given[slot].load(std::memory_order_acquire) < times_[slot]) return true;
  return false;
}

// A rank that is ahead may write its own bytes there already, but reads this one's only after the next gather.
void GatherSlots::trim() {
  for (int slot = 0; slot < count_; ++slot) {
    if (!has_pages_[slot] || is_read(slot)) continue;
    for (const Interval& bytes : own_) allocator_.zero(data(slot) + bytes.begin, bytes.size());
    has_pages_[slot] = false;
  }
}

}  // namespace dovetail::engine_detail

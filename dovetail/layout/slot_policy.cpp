#include "dovetail/layout/slot_policy.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail {

SlotPolicy::SlotPolicy(std::vector<int64_t> sizes) : sizes_(std::move(sizes)), used_(sizes_.size(), false) {}

int64_t SlotPolicy::acquire(int64_t bytes) {
  DT_CHECK_GE(bytes, 0);
  int64_t fitting = -1, largest = -1;
  for (int64_t slot = 0; slot < std::ssize(sizes_); ++slot) {
    if (used_[slot]) continue;
    if (sizes_[slot] >= bytes && (fitting < 0 || sizes_[slot] < sizes_[fitting])) fitting = slot;
    if (largest < 0 || sizes_[slot] > sizes_[largest]) largest = slot;
  }
  int64_t slot = fitting >= 0 ? fitting : largest;
  if (slot < 0) {
    slot = std::ssize(sizes_);
    sizes_.push_back(bytes);
    used_.push_back(false);
  }
  sizes_[slot] = std::max(sizes_[slot], bytes);
  used_[slot] = true;
  return slot;
}

void SlotPolicy::release(int64_t slot) {
  DT_CHECK(0 <= slot && slot < std::ssize(used_) && used_[slot], "slot {} of {} is not in use", slot, used_.size());
  used_[slot] = false;
}

int64_t SlotPolicy::total() const { return std::accumulate(sizes_.begin(), sizes_.end(), int64_t{0}); }

int64_t SlotPolicy::in_use_count() const { return std::count(used_.begin(), used_.end(), true); }

}  // namespace dovetail

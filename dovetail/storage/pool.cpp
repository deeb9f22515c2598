#include "dovetail/storage/pool.h"

#include <algorithm>
#include <numeric>

#include "dovetail/base/error.h"

namespace dovetail {

SlotPool::SlotPool(Allocator& allocator, Ledger& ledger, const std::vector<int64_t>& sizes)
    : allocator_(allocator), ledger_(ledger), planned_(sizes), policy_(sizes) {
  for (int64_t bytes : sizes) buffers_.emplace_back(allocator, ledger, bytes, Role::slot);
  touched_.resize(sizes.size());
}

SlotPool::Slot SlotPool::acquire(int64_t bytes) {
  const int64_t number = policy_.acquire(bytes);
  if (number == static_cast<int64_t>(buffers_.size())) {
    buffers_.emplace_back();
    touched_.push_back(0);
  }
  Buffer& buffer = buffers_[number];
  if (buffer.bytes() != policy_.sizes()[number]) {
    buffer.reset();  // before the larger one is made, so that both never exist
    buffer = Buffer(allocator_, ledger_, policy_.sizes()[number], Role::slot);
    touched_[number] = 0;
  }
  touched_[number] = std::max(touched_[number], bytes);
  Slot slot;
  slot.pool_ = this;
  slot.number_ = number;
  slot.data_ = buffer.data();
  slot.bytes_ = bytes;
  return slot;
}

void SlotPool::restore() {
  if (policy_.sizes() == planned_) return;
  DT_CHECK_EQ(in_use(), 0, "slots in use");
  buffers_.clear();
  touched_.assign(planned_.size(), 0);
  policy_ = SlotPolicy(planned_);
  for (int64_t bytes : planned_) buffers_.emplace_back(allocator_, ledger_, bytes, Role::slot);
}

void SlotPool::trim(int64_t bytes, int64_t slots) {
  std::vector<size_t> by_size(buffers_.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::ranges::stable_sort(by_size, {}, [&](size_t i) { return buffers_[i].bytes(); });
  for (const size_t i : by_size) {
    if (policy_.in_use(static_cast<int64_t>(i))) continue;
    const bool kept = buffers_[i].bytes() < bytes || slots-- > 0;
    const int64_t keeps = kept ? bytes : 0;
    if (touched_[i] <= keeps) continue;
    buffers_[i].zero(buffers_[i].data() + keeps, touched_[i] - keeps);
    touched_[i] = keeps;
  }
}

SlotPool::Slot& SlotPool::Slot::operator=(Slot&& other) noexcept {
  if (this != &other) {
    reset();
    pool_ = std::exchange(other.pool_, nullptr);
    number_ = other.number_;
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void SlotPool::Slot::reset() {
  if (pool_) pool_->policy_.release(number_);
  pool_ = nullptr;
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace dovetail

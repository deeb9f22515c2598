// Which slot of a pool serves a request: the policy alone, without memory. The planner runs it on the
// schedule to size the pool before training; storage/pool runs it on the real thing, so both come to the same
// slots.
#pragma once

#include <cstdint>
#include <vector>

namespace dovetail {

class SlotPolicy {
 public:
  SlotPolicy() = default;
  // Starts with free slots of the given sizes (bytes).
  explicit SlotPolicy(std::vector<int64_t> sizes);

  // The smallest free slot that holds `bytes` (ties: lowest number). Where none does: the largest free slot,
  // enlarged; where none is free: a new slot of that size. Zero bytes are a request like any other.
  int64_t acquire(int64_t bytes);
  void release(int64_t slot);  // throws InvariantError unless in use

  bool in_use(int64_t slot) const { return used_.at(slot); }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t total() const;  // bytes of all slots
  int64_t in_use_count() const;

 private:
  std::vector<int64_t> sizes_;
  std::vector<bool> used_;
};

}  // namespace dovetail

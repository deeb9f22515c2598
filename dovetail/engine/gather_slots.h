// Memory in which encoded parameters of one group after another are gathered, where ranks share memory: pages that stay
// cost neither the faults nor the zeroing of those that each group gives back and takes again, twice in a step.
//
// All ranks must gather into the same slot, while each releases in its own time. So no rank decides by what it sees:
// with each gather it publishes which slots it does not read, and where the next one goes follows from what all have
// published with the one before, which has ended by then.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/comm/group.h"
#include "dovetail/storage/memory.h"

namespace dovetail::engine_detail {

class ShardGroup;

class GatherSlots {
 public:
  static constexpr int kNone = -1;
  static constexpr int kMost = 32;  // slots

  // Where so many groups are gathered ahead of the one that computes: those, and one that ranks may not have released.
  static int count(int prefetch) { return std::min(prefetch + 2, kMost); }

  // Collective. Every group that uses them has `whole` bytes, of which this rank writes `own`, the same ones for all
  // these groups. `allocator` zeroes what lies there.
  GatherSlots(comm::Group& ranks, Allocator& allocator, int64_t whole, std::vector<Interval> own, int count,
              const comm::Identity& id);

  // The group of the last take(), whose gather must have ended before the next; null: none.
  ShardGroup* last() const { return last_; }
  // For the next gather, the same on all ranks; kNone where they know of none that all are free to write.
  int take(ShardGroup* group);
  std::byte* data(int slot) const { return memory_.get() + slot * stride_; }
  // This rank reads it no more.
  void give(int slot);
  // Gives back the pages of this rank's bytes in slots that no rank reads.
  void trim();

 private:
  // By one rank, in memory of all.
  struct alignas(64) Published {
    std::atomic<uint64_t> free[2];       // at even and odd gathers: a bit for each slot that it did not read then
    std::atomic<uint64_t> given[kMost];  // per slot: how often it was taken and given back
  };

  Published& of(int member) const;
  bool is_read(int slot) const;

  comm::Group& ranks_;
  Allocator& allocator_;
  const std::vector<Interval> own_;
  const int count_;
  const int64_t stride_;  // bytes from slot to slot
  const std::shared_ptr<std::byte> memory_;
  ShardGroup* last_ = nullptr;
  uint64_t gathers_ = 0;         // so far
  uint64_t free_;                // slots that this rank does not read, a bit each
  std::vector<uint64_t> times_;  // per slot: how often it was taken
  std::vector<bool> has_pages_;  // per slot: of this rank's bytes
};

}  // namespace dovetail::engine_detail

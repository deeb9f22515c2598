// The smallest shards for tensors that share one segment.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dovetail/plan/packing.h"
#include "dovetail/plan/ragged.h"

namespace dovetail::plan {

// What can be said before any search.
struct SegmentBounds {
  int64_t shard2 = 0;  // F5: smallest admissible size that holds all blocks
  int64_t shard1 = 0;
  int64_t cost = 0;  // of these two
};

// Of tensors of these types in one segment; 0 for none. Needs no members. `block_bound` is one of
// the bounds of lower_bound.h.
SegmentBounds segment_bounds(const RaggedProblem& problem, const TensorTypes& types,
                             int64_t (*block_bound)(const TensorTypes&, int64_t));

struct SegmentChoice {
  Grid grid;               // period = shard2, step = shard1
  std::vector<int> order;  // of the tensors
  int64_t cost = 0;
  SegmentBounds bounds;  // raised by every proved refusal
  bool exact = false;    // cost is minimal
};

class SegmentSearch {
 public:
  SegmentSearch(const RaggedProblem& problem, std::span<const int> chosen);

  const SegmentBounds& bounds() const { return bounds_; }
  SegmentChoice run(SearchEffort& effort) const;

  const TensorTypes& types() const { return types_; }

 private:
  struct Level {
    int64_t shard = 0;
    int64_t bound = 0;
    bool exact = false;
    std::vector<int> order;
  };
  Level aligned_level(const Packer& packer, int64_t bound, SearchEffort& effort) const;
  Level one_level(int64_t shards, int64_t bound, SearchEffort& effort) const;
  void scan_periods(SegmentChoice& best, const Level& coarse, SearchEffort& effort) const;
  bool scan_steps(SegmentChoice& best, int64_t period, SearchEffort& effort) const;
  void fall_back(SegmentChoice& best, const Level& coarse, SearchEffort& effort) const;
  void accept(SegmentChoice& best, Grid grid, std::vector<int> order) const;
  int64_t cost(int64_t period, int64_t step) const;
  int64_t least_step(int64_t period) const;

  const RaggedProblem& problem_;
  TensorTypes types_;
  SegmentBounds bounds_;
  int64_t coarse_ratio_;  // zero2 / zero3
  int64_t fine_ratio_;    // zero1 / zero2
};

}  // namespace dovetail::plan

#include "dovetail/plan/shard_packer.h"

#include <algorithm>

namespace dovetail::plan {
namespace {

constexpr int kPatternNodes = 2000;  // of the depth-first search for one pattern ...
constexpr int kQuickNodes = 50;      // ... and once the effort is spent

// The fullest choice of things, sizes descending, for `room` units.
class PatternSearch {
 public:
  PatternSearch(const std::vector<int64_t>& sizes, const std::vector<int64_t>& left)
      : sizes_(sizes), left_(left) {}

  std::vector<int64_t> best(int64_t room, int most_nodes) {
    most_nodes_ = most_nodes;
    taken_.assign(sizes_.size(), 0);
    best_ = taken_;
    size_t largest = 0;
    while (largest < sizes_.size() && (left_[largest] == 0 || sizes_[largest] > room)) ++largest;
    if (largest == sizes_.size()) return best_;
    least_ = room + 1;
    nodes_ = 0;
    taken_[largest] = 1;
    extend(largest, room - sizes_[largest]);
    return best_;
  }
  int nodes() const { return nodes_; }

 private:
  void extend(size_t from, int64_t room) {
    ++nodes_;
    if (room < least_) {
      least_ = room;
      best_ = taken_;
    }
    for (size_t i = from; i < sizes_.size() && least_ > 0 && nodes_ < most_nodes_; ++i) {
      if (taken_[i] == left_[i] || sizes_[i] > room) continue;
      ++taken_[i];
      extend(i, room - sizes_[i]);
      --taken_[i];
    }
  }

  const std::vector<int64_t>& sizes_;
  const std::vector<int64_t>& left_;
  std::vector<int64_t> taken_, best_;
  int64_t least_ = 0;
  int nodes_ = 0;
  int most_nodes_ = 0;
};

bool is_hard(const Grid& grid, RaggedTensor t) {
  return t.extent <= grid.step &&
         (t.block == t.extent || grid.period % t.block != 0 || grid.step % t.block != 0);
}

}  // namespace

CellPacking pack_cells(const Grid& grid, const TensorTypes& types, int64_t capacity,
                       SearchEffort& effort) {
  CellPacking r{{}, std::vector<int64_t>(types.types.size(), 0), 0};
  std::vector<int> hard;
  for (int i = 0; i < static_cast<int>(types.types.size()); ++i)
    if (types.types[i].shape.block > 1 && is_hard(grid, types.types[i].shape)) hard.push_back(i);
  std::stable_sort(hard.begin(), hard.end(), [&](int a, int b) {
    return types.types[a].shape.extent > types.types[b].shape.extent;
  });
  std::vector<int64_t> sizes, left;
  for (int i : hard)
    sizes.push_back(types.types[i].shape.extent), left.push_back(types.types[i].count);

  PatternSearch search(sizes, left);
  std::vector<int64_t> pattern;
  int64_t pattern_room = -1;
  const auto lasts = [&] {
    for (size_t i = 0; i < left.size(); ++i)
      if (pattern[i] > left[i]) return false;
    return true;
  };
  const auto any_left = [&] {
    return std::any_of(left.begin(), left.end(), [](int64_t n) { return n > 0; });
  };
  for (int64_t cell = 0; any_left() && r.end <= capacity;) {
    const int64_t next = grid.boundary_after(cell);
    if (pattern_room != next - cell || !lasts()) {
      pattern_room = next - cell;
      pattern = search.best(pattern_room, effort.spent() ? kQuickNodes : kPatternNodes);
      effort.steps += search.nodes();
    }
    for (size_t i = 0; i < pattern.size(); ++i) {
      if (pattern[i] == 0) continue;
      left[i] -= pattern[i];
      r.placed[hard[i]] += pattern[i];
      r.order.push_back({hard[i], pattern[i]});
      r.end = std::max(r.end, cell) + pattern[i] * sizes[i];
    }
    cell = next;
  }
  return r;
}

}  // namespace dovetail::plan

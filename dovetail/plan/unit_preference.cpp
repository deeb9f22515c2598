#include "dovetail/plan/unit_preference.h"

#include <algorithm>
#include <utility>

#include "dovetail/base/math.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kPlacements = 200'000;  // tensors placed over all orders tried

// Elements of the tensor at `offset` (planner units) outside their unit's largest fragment.
int64_t exchanged_of(const Grid& grid, int64_t offset, const std::vector<int64_t>& edges,
                     int64_t alignment) {
  if (edges.size() < 2) return 0;
  const int64_t begin = offset * alignment, end = begin + edges.back();
  int64_t exchanged = 0;
  size_t unit = 0;                // the unit that holds `from`
  int64_t from = 0, largest = 0;  // start and largest of the fragments seen of it, tensor-relative
  const auto close_units = [&](int64_t to) {  // [from, to) belongs to one shard
    while (from < to) {
      const int64_t stop = std::min(to, edges[unit + 1]);
      largest = std::max(largest, stop - from);
      if (stop == edges[unit + 1]) {
        exchanged += edges[unit + 1] - edges[unit] - largest;
        largest = 0;
        ++unit;
      }
      from = stop;
    }
  };
  for (int64_t b = grid.boundary_after(offset) * alignment; b < end;
       b = grid.boundary_after(b / alignment) * alignment)
    close_units(b - begin);
  close_units(edges.back());
  return exchanged;
}

class Preference {
 public:
  Preference(const RaggedProblem& problem, const UnitEdges& units, const RaggedSegment& segment)
      : problem_(problem),
        units_(units),
        grid_{segment.shard2, segment.shard1},
        capacity_(segment.shard2 * problem.degrees.zero2),
        best_(segment.placements),
        cost_(exchanged_elements(segment, units)) {
    while (owning_ < best_.size() && problem.tensors[best_[owning_].tensor].extent == 0) ++owning_;
  }

  void improve_order() {
    for (bool improved = true; improved && cost_ > 0;) {
      improved = false;
      for (size_t i = owning_; i < best_.size() && !spent(); ++i)
        for (size_t j = owning_; j < best_.size() && !spent(); ++j)
          improved |= i != j && try_move(i, j);
    }
  }

  void improve_starts() {
    for (size_t i = owning_; i < best_.size() && cost_ > 0 && !spent(); ++i) {
      const auto& edges = units_.edges[best_[i].tensor];
      if (edges.size() < 2) continue;
      const int64_t x = best_[i].offset, b = grid_.boundary_after(x);
      // So that the boundary falls on the last edge before it, or behind the whole of what the
      // shard cannot hold.
      auto edge = std::lower_bound(edges.begin(), edges.end(), (b - x) * units_.alignment);
      while (edge != edges.begin() && *--edge % units_.alignment != 0) {
      }
      try_start(i, b - *edge / units_.alignment);
      try_start(i, b);
    }
  }

  std::vector<RaggedPlacement> take() { return std::move(best_); }

 private:
  bool spent() const { return placed_ >= kPlacements; }

  // Moves the tensor at position i of the order to position j.
  bool try_move(size_t i, size_t j) {
    std::vector<RaggedPlacement> order = best_;
    if (i < j)
      std::rotate(order.begin() + i, order.begin() + i + 1, order.begin() + j + 1);
    else
      std::rotate(order.begin() + j, order.begin() + i, order.begin() + i + 1);
    return accept(std::move(order), std::min(i, j), 0);
  }

  bool try_start(size_t i, int64_t start) {
    return start > best_[i].offset && accept(best_, i, start);
  }

  // Places order[first..] anew, the first of them not before `start`; keeps the result when it fits
  // and is cheaper.
  bool accept(std::vector<RaggedPlacement> order, size_t first, int64_t start) {
    int64_t end = first == owning_
                      ? 0
                      : order[first - 1].offset + problem_.tensors[order[first - 1].tensor].extent;
    end = std::max(end, start);
    int64_t cost = 0;
    for (size_t i = 0; i < order.size() && cost < cost_; ++i) {
      RaggedPlacement& p = order[i];
      const RaggedTensor& t = problem_.tensors[p.tensor];
      if (i >= first) {
        ++placed_;
        p.offset = grid_.earliest_start(end, t);
        if (p.offset < 0 || p.offset + t.extent > capacity_) return false;
        end = p.offset + t.extent;
      }
      cost += exchanged_of(grid_, p.offset, units_.edges[p.tensor], units_.alignment);
    }
    if (cost >= cost_) return false;
    best_ = std::move(order);
    cost_ = cost;
    return true;
  }

  const RaggedProblem& problem_;
  const UnitEdges& units_;
  const Grid grid_;
  const int64_t capacity_;
  std::vector<RaggedPlacement> best_;
  int64_t cost_;
  size_t owning_ = 0;  // position of the first tensor that has elements
  int64_t placed_ = 0;
};

}  // namespace

bool UnitEdges::any() const {
  return std::any_of(edges.begin(), edges.end(), [](const auto& e) { return e.size() >= 2; });
}

int64_t exchanged_elements(const RaggedSegment& s, const UnitEdges& units) {
  const Grid grid{s.shard2, s.shard1};
  int64_t sum = 0;
  for (const RaggedPlacement& p : s.placements)
    sum += exchanged_of(grid, p.offset, units.edges[p.tensor], units.alignment);
  return sum;
}

void prefer_unit_edges(const RaggedProblem& problem, const UnitEdges& units,
                       RaggedSegment& segment) {
  if (!units.any() || segment.shard2 == 0) return;
  Preference preference(problem, units, segment);
  preference.improve_order();
  preference.improve_starts();
  segment.placements = preference.take();
}

}  // namespace dovetail::plan

#include "dovetail/plan/type_search.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace dovetail::plan {
namespace {

struct State {
  uint64_t key;    // mixed-radix number of the counts placed
  int64_t end;     // smallest end found for these counts
  int64_t placed;  // units placed; end - start - placed = gap
  int64_t hard;    // sum of blocks placed
  int parent;      // index in the layer before
  int move;        // the move that led here
};

struct Layer {
  std::vector<State> states;
  std::vector<uint16_t> counts;  // states x moves
};

// Finds the state of a key within the layer under construction.
class KeyTable {
 public:
  explicit KeyTable(size_t most) : slots_(std::bit_ceil(2 * most + 2)) {}
  // Index held for the key, or inserts `fresh` and returns it.
  int find_or_insert(uint64_t key, int fresh) {
    for (size_t i = (key * 0x9e3779b97f4a7c15ull) >> (64 - std::countr_zero(slots_.size()));; ++i) {
      Slot& s = slots_[i & (slots_.size() - 1)];
      if (s.layer != layer_) return s = {key, layer_, fresh}, fresh;
      if (s.key == key) return s.index;
    }
  }
  void next_layer() { ++layer_; }

 private:
  struct Slot {
    uint64_t key = 0;
    int layer = -1;
    int index = 0;
  };
  std::vector<Slot> slots_;
  int layer_ = 0;
};

class TypeSearch {
 public:
  TypeSearch(const Grid& grid, const std::vector<Move>& moves, Interval range, int beam,
             SearchEffort& effort)
      : moves_(moves), range_(range), beam_(beam), effort_(effort), table_(beam * moves.size()) {
    int64_t total = 0;
    uint64_t radix = 1;
    for (const Move& m : moves) {
      placers_.emplace_back(grid, m.shape);
      costs_.push_back(placers_.back().whole_blocks() ? 1 : m.run);
      radix_.push_back(radix);
      const uint64_t base = m.count + 1;
      if (radix > ~uint64_t{0} / base)
        exact_ = false;  // keys may collide: still sound, no longer a proof
      radix *= base;
      depth_ += m.count;
      total += m.shape.extent * m.run * m.count;
    }
    slack_ = range.end - range.begin - total;
  }

  TypeOrder run() {
    if (slack_ < 0) return {Verdict::refused, {}};
    layers_.push_back({{{0, range_.begin, 0, 0, -1, -1}}, std::vector<uint16_t>(moves_.size(), 0)});
    for (int64_t n = 0; n < depth_; ++n) {
      if (effort_.spent()) return {};
      expand();
      if (layers_.back().states.empty()) return {exact_ ? Verdict::refused : Verdict::unknown, {}};
      if (layers_.back().states.size() > static_cast<size_t>(beam_)) truncate();
      count_moves();
    }
    return {Verdict::fits, backtrack()};
  }

 private:
  int64_t gap(const State& s) const { return s.end - range_.begin - s.placed; }

  void expand() {
    layers_.emplace_back();
    const Layer& from = layers_[layers_.size() - 2];
    std::vector<State>& to = layers_.back().states;
    const int width = static_cast<int>(moves_.size());
    table_.next_layer();
    for (int i = 0; i < static_cast<int>(from.states.size()); ++i) {
      const State& s = from.states[i];
      for (int m = 0; m < width; ++m) {
        const Move& move = moves_[m];
        if (from.counts[size_t(i) * width + m] == move.count) continue;
        effort_.steps += costs_[m];
        const int64_t end = placers_[m].end_of_run(s.end, move.run);
        const State next{s.key + radix_[m],
                         end,
                         s.placed + move.shape.extent * move.run,
                         s.hard + move.shape.block * move.run,
                         i,
                         m};
        if (end < 0 || gap(next) > slack_) continue;
        const int at = table_.find_or_insert(next.key, static_cast<int>(to.size()));
        if (at == static_cast<int>(to.size()))
          to.push_back(next);
        else if (end < to[at].end)
          to[at] = next;
      }
    }
  }

  void truncate() {
    exact_ = false;
    std::vector<State>& states = layers_.back().states;
    std::nth_element(states.begin(), states.begin() + beam_, states.end(),
                     [this](const State& a, const State& b) {
                       if (gap(a) != gap(b)) return gap(a) < gap(b);
                       if (a.hard != b.hard) return a.hard > b.hard;
                       return a.key < b.key;
                     });
    states.resize(beam_);
  }

  void count_moves() {
    const Layer& from = layers_[layers_.size() - 2];
    Layer& to = layers_.back();
    const size_t width = moves_.size();
    to.counts.resize(to.states.size() * width);
    for (size_t i = 0; i < to.states.size(); ++i) {
      std::copy_n(from.counts.begin() + to.states[i].parent * width, width,
                  to.counts.begin() + i * width);
      ++to.counts[i * width + to.states[i].move];
    }
  }

  std::vector<int> backtrack() const {
    std::vector<int> order(depth_);
    const auto& last = layers_.back().states;
    int at = static_cast<int>(
        std::min_element(last.begin(), last.end(), [](auto& a, auto& b) { return a.end < b.end; }) -
        last.begin());
    for (int64_t n = depth_; n > 0; --n) {
      const State& s = layers_[n].states[at];
      order[n - 1] = s.move;
      at = s.parent;
    }
    return order;
  }

  const std::vector<Move>& moves_;
  std::vector<TensorOnGrid> placers_;  // per move
  std::vector<int64_t> costs_;         // steps that a move counts for
  const Interval range_;
  const int beam_;
  SearchEffort& effort_;
  KeyTable table_;
  std::vector<uint64_t> radix_;
  int64_t depth_ = 0;
  int64_t slack_ = 0;
  bool exact_ = true;
  std::vector<Layer> layers_;
};

}  // namespace

TypeOrder search_types(const Grid& grid, const std::vector<Move>& moves, Interval range, int beam,
                       SearchEffort& effort) {
  return TypeSearch(grid, moves, range, beam, effort).run();
}

}  // namespace dovetail::plan

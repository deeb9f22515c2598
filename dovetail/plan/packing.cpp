#include "dovetail/plan/packing.h"

#include <algorithm>
#include <numeric>

#include "dovetail/base/math.h"
#include "dovetail/plan/shard_packer.h"
#include "dovetail/plan/type_search.h"

namespace dovetail::plan {
namespace {

constexpr int kBeam = 128;
constexpr int kWideBeam = 512;
constexpr int64_t kFewCounts = 8;   // a type of more things is moved in runs ...
constexpr size_t kGivenTried = 64;  // more tensors: the given order only where another one fits
constexpr int64_t kExactStates =
    4096;  // ... unless all counts together span no more states than this

struct Moves {
  std::vector<Move> moves;
  bool runs = false;  // several things move at once: a refusal proves nothing
};

Moves moves_of(const TensorTypes& types, const std::vector<int64_t>& placed) {
  Moves r;
  int64_t states = 1;
  for (const TensorType& t : types.types)
    states = std::min(kExactStates + 1, states * (t.count + 1));
  for (int i = 0; i < static_cast<int>(types.types.size()); ++i) {
    const TensorType& t = types.types[i];
    const int64_t count = t.count - placed[i];
    const int64_t run =
        count <= kFewCounts || states <= kExactStates ? 1 : ceil_div(count, kFewCounts);
    r.runs |= run > 1;
    if (count / run > 0) r.moves.push_back({t.shape, i, run, count / run});
    if (count % run > 0) r.moves.push_back({t.shape, i, count % run, 1});
  }
  return r;
}

// Turns an order of types into one of tensors.
class Members {
 public:
  explicit Members(const TensorTypes& types) : types_(types), used_(types.types.size(), 0) {}
  void take(int type, int64_t things, std::vector<int>& order) {
    const TensorType& t = types_.types[type];
    const int64_t each = static_cast<int64_t>(t.members.size()) / t.count;
    const auto first = t.members.begin() + used_[type] * each;
    order.insert(order.end(), first, first + things * each);
    used_[type] += things;
  }

 private:
  const TensorTypes& types_;
  std::vector<int64_t> used_;
};

int64_t end_of_types(const Grid& grid, const TensorTypes& types, const std::vector<int>& order) {
  int64_t end = 0;
  for (int i : order) {
    end = TensorOnGrid(grid, types.types[i].shape).end_of_run(end, types.types[i].count);
    if (end < 0) return -1;
  }
  return end;
}

int64_t end_of_given(const Grid& grid, std::span<const RaggedTensor> tensors,
                     const std::vector<int>& order) {
  int64_t end = 0;
  for (int i : order) {
    const int64_t x = grid.earliest_start(end, tensors[i]);
    if (x < 0) return -1;
    end = x + tensors[i].extent;
  }
  return end;
}

std::vector<int> all_of_types(const TensorTypes& types, const std::vector<int>& type_order) {
  Members members(types);
  std::vector<int> order;
  for (int i : type_order) members.take(i, types.types[i].count, order);
  return order;
}

// Types by block descending, then by extent descending. Empty when neither fits.
std::vector<int> fixed_order(const Grid& grid, const TensorTypes& types, int64_t capacity) {
  const auto fits = [capacity](int64_t end) { return end >= 0 && end <= capacity; };
  std::vector<int> order(types.types.size());
  std::iota(order.begin(), order.end(), 0);
  if (fits(end_of_types(grid, types, order))) return all_of_types(types, order);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    return types.types[a].shape.extent > types.types[b].shape.extent;
  });
  if (fits(end_of_types(grid, types, order))) return all_of_types(types, order);
  return {};
}

// What pack_cells left over, behind it.
Packing cells_then_search(const Grid& grid, const TensorTypes& types, int64_t capacity,
                          SearchEffort& effort) {
  const CellPacking cells = pack_cells(grid, types, capacity, effort);
  if (cells.end == 0 || cells.end > capacity) return {};
  const Moves rest = moves_of(types, cells.placed);
  TypeOrder tail{Verdict::fits, {}};
  if (!rest.moves.empty())
    tail = search_types(grid, rest.moves, {cells.end, capacity}, kBeam, effort);
  if (tail.verdict != Verdict::fits) return {};
  Packing r{Verdict::fits, {}};
  Members members(types);
  for (CellRun run : cells.order) members.take(run.type, run.count, r.order);
  for (int m : tail.moves) members.take(rest.moves[m].type, rest.moves[m].run, r.order);
  return r;
}

}  // namespace

Packer::Packer(std::span<const RaggedTensor> tensors, const TensorTypes& types, int64_t periods)
    : tensors_(tensors), types_(types), periods_(periods) {
  for (const TensorType& t : types.types)
    given_.insert(given_.end(), t.members.begin(), t.members.end());
  std::sort(given_.begin(), given_.end());
}

Packing Packer::pack_fixed(const Grid& grid, SearchEffort& effort) const {
  const int64_t capacity = periods_ * grid.period;
  if (types_.total > capacity) return {Verdict::refused, {}};
  for (const TensorType& t : types_.types)
    if (grid.earliest_start(0, t.shape) < 0) return {Verdict::refused, {}};
  effort.steps += static_cast<int64_t>(types_.types.size());
  std::vector<int> fixed = fixed_order(grid, types_, capacity);
  if (!fixed.empty() || given_.size() <= kGivenTried) {
    effort.steps += static_cast<int64_t>(given_.size());
    const int64_t end = end_of_given(grid, tensors_, given_);
    if (end >= 0 && end <= capacity) return {Verdict::fits, given_};
  }
  if (!fixed.empty()) return {Verdict::fits, std::move(fixed)};
  return {};
}

Packing Packer::pack(const Grid& grid, SearchEffort& effort) const {
  if (Packing p = pack_fixed(grid, effort); p.verdict != Verdict::unknown) return p;
  const int64_t capacity = periods_ * grid.period;
  if (effort.spent()) return cells_then_search(grid, types_, capacity, effort);
  const Moves moves = moves_of(types_, std::vector<int64_t>(types_.types.size(), 0));
  TypeOrder found;
  for (int beam : {kBeam, kWideBeam}) {
    found = search_types(grid, moves.moves, {0, capacity}, beam, effort);
    if (found.verdict != Verdict::unknown || effort.spent()) break;
  }
  if (found.verdict == Verdict::fits) {
    Packing r{Verdict::fits, {}};
    Members members(types_);
    for (int m : found.moves) members.take(moves.moves[m].type, moves.moves[m].run, r.order);
    return r;
  }
  if (found.verdict == Verdict::refused && !moves.runs && !types_.lumped)
    return {Verdict::refused, {}};
  return cells_then_search(grid, types_, capacity, effort);
}

}  // namespace dovetail::plan

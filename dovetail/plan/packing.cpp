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
constexpr int64_t kFewCounts = 8;  // a type of more things is moved in runs ...
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
    end = grid.end_of_run(end, types.types[i].shape, types.types[i].count);
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

std::vector<int> given_order(const TensorTypes& types) {
  std::vector<int> order;
  for (const TensorType& t : types.types)
    order.insert(order.end(), t.members.begin(), t.members.end());
  std::sort(order.begin(), order.end());
  return order;
}

std::vector<int> all_of_types(const TensorTypes& types, const std::vector<int>& type_order) {
  Members members(types);
  std::vector<int> order;
  for (int i : type_order) members.take(i, types.types[i].count, order);
  return order;
}

// As given; block descending; extent descending. Empty when none fits.
std::vector<int> fixed_order(const Grid& grid, std::span<const RaggedTensor> tensors,
                             const TensorTypes& types, int64_t capacity) {
  const auto fits = [capacity](int64_t end) { return end >= 0 && end <= capacity; };
  const std::vector<int> given = given_order(types);
  if (fits(end_of_given(grid, tensors, given))) return given;
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
  const CellPacking cells = pack_cells(grid, types, effort);
  if (cells.order.empty() || cells.end > capacity) return {};
  const Moves rest = moves_of(types, cells.placed);
  TypeOrder tail{Verdict::fits, {}};
  if (!rest.moves.empty())
    tail = search_types(grid, rest.moves, {cells.end, capacity}, kBeam, effort);
  if (tail.verdict != Verdict::fits) return {};
  Packing r{Verdict::fits, {}};
  Members members(types);
  for (int type : cells.order) members.take(type, 1, r.order);
  for (int m : tail.moves) members.take(rest.moves[m].type, rest.moves[m].run, r.order);
  return r;
}

}  // namespace

Packing Packer::pack(const Grid& grid, SearchEffort& effort) const {
  const int64_t capacity = periods_ * grid.period;
  if (types_.total > capacity) return {Verdict::refused, {}};
  if (types_.types.empty()) return {Verdict::fits, {}};
  for (const TensorType& t : types_.types)
    if (grid.earliest_start(0, t.shape) < 0) return {Verdict::refused, {}};
  effort.steps += static_cast<int64_t>(types_.types.size());
  if (std::vector<int> order = fixed_order(grid, tensors_, types_, capacity); !order.empty())
    return {Verdict::fits, std::move(order)};

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

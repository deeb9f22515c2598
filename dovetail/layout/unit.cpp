#include "dovetail/layout/unit.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

// A tensor as a stack of matrices: fused experts are many, all else is one.
struct Stack {
  int64_t matrices, rows, columns;
};

Stack stack_of(const TensorSpec& t) {
  if (t.kind == ParamKind::expert && t.shape.size() == 3)
    return {t.shape[0], t.shape[1], t.shape[2]};
  if (t.shape.size() < 2) return {1, 1, t.numel()};
  return {1, t.shape[0], t.shape[0] == 0 ? 0 : t.numel() / t.shape[0]};
}

std::vector<UnitPlace> tiles(const TensorSpec& t, int64_t tile_rows, int64_t tile_columns) {
  if (tile_rows < 1 || tile_columns < 1)
    raise<ConfigError>("{}: wanted tiles of at least 1 x 1, got {} x {}", t.name, tile_rows,
                       tile_columns);
  std::vector<UnitPlace> places;
  const Stack s = stack_of(t);
  for (int64_t m = 0; m < s.matrices; ++m)
    for (int64_t r = 0; r < s.rows; r += tile_rows)
      for (int64_t c = 0; c < s.columns; c += tile_columns)
        places.push_back({.first = (m * s.rows + r) * s.columns + c,
                          .rows = std::min(tile_rows, s.rows - r),
                          .columns = std::min(tile_columns, s.columns - c),
                          .stride = s.columns});
  return places;
}

TensorNodes nodes_named(const TensorSpec& t, const std::string& name) {
  for (const TensorNodes& n : t.nodes)
    if (n.name == name) return n;
  auto evenly = [&](int dim, int64_t count) {
    if (dim >= std::ssize(t.shape) || count < 1 || t.shape[dim] % count != 0)
      raise<ConfigError>("{}: {} {}s along dimension {} do not divide its shape [{}]", t.name,
                         count, name, dim, fmt::join(t.shape, ", "));
    TensorNodes nodes{name, dim, {0}};
    for (int64_t i = 1; i <= count; ++i) nodes.edges.push_back(i * (t.shape[dim] / count));
    return nodes;
  };
  if (name == "head" && t.heads > 0) return evenly(t.heads_dim, t.heads);
  if (name == "expert" && t.kind == ParamKind::expert && !t.shape.empty())
    return evenly(0, t.shape[0]);
  raise<ConfigError>("{}: an operation wants its nodes \"{}\", but it has none of that name",
                     t.name, name);
}

std::vector<UnitPlace> nodes(const TensorSpec& t, const TensorNodes& n) {
  validate_nodes(t, n);
  int64_t inner = 1;
  for (size_t d = n.dim + 1; d < t.shape.size(); ++d) inner *= t.shape[d];
  std::vector<UnitPlace> places;
  for (size_t i = 0; i + 1 < n.edges.size(); ++i) {
    const int64_t extent = n.edges[i + 1] - n.edges[i];
    if (extent == 0 || inner == 0) continue;
    const int64_t first = n.edges[i] * inner;
    // Along dimension 0 the node is a run of rows; a single fused expert is a matrix of its own.
    if (n.dim == 0 && t.kind == ParamKind::expert && t.shape.size() == 3 && extent == 1)
      places.push_back({first, t.shape[1], t.shape[2], t.shape[2]});
    else if (n.dim == 0)
      places.push_back({first, extent, inner, inner});
    else if (t.shape[0] > 0)
      places.push_back({first, t.shape[0], extent * inner, t.shape[1] * inner});
  }
  return places;
}

}  // namespace

std::string Unit::describe() const {
  switch (kind) {
    case UnitKind::element:
      return "element";
    case UnitKind::block:
      return fmt::format("block of {}", block);
    case UnitKind::row:
      return "row";
    case UnitKind::matrix:
      return "matrix";
    case UnitKind::node:
      return "node " + node;
    case UnitKind::tile:
      return fmt::format("tile of {} x {}", tile_rows, tile_columns);
  }
  return {};
}

Interval UnitPlace::span() const {
  if (numel() == 0) return {};
  return {first, first + (rows - 1) * stride + columns};
}

Interval UnitPlace::packed_in(Interval held) const {
  // Packed index of the first element of the unit at or after an element of the tensor.
  auto packed = [&](int64_t element) {
    if (element <= first) return int64_t{0};
    const int64_t row = (element - first) / stride, column = (element - first) % stride;
    return row >= rows ? numel() : row * columns + std::min(column, columns);
  };
  if (numel() == 0 || held.empty()) return {};
  const Interval result{packed(held.begin), packed(held.end)};
  return result.empty() ? Interval{} : result;
}

IntervalList UnitPlace::runs(Interval packed) const {
  IntervalList list;
  if (packed.empty()) return list;
  if (contiguous()) return {packed.shifted(first)};
  for (int64_t at = packed.begin; at < packed.end;) {
    const int64_t row = at / columns, column = at % columns;
    const int64_t n = std::min(columns - column, packed.end - at);
    const int64_t begin = first + row * stride + column;
    list.push_back({begin, begin + n});
    at += n;
  }
  return list;
}

std::vector<UnitPlace> unit_places(const TensorSpec& t, const Unit& unit) {
  if (t.numel() == 0) return {};
  switch (unit.kind) {
    case UnitKind::matrix: {
      const Stack s = stack_of(t);
      return tiles(t, s.rows, s.columns);
    }
    case UnitKind::tile:
      return tiles(t, unit.tile_rows, unit.tile_columns);
    case UnitKind::node:
      return nodes(t, nodes_named(t, unit.node));
    default:
      DT_CHECK(false, "units of kind {} are not assembled", unit.describe());
  }
  return {};
}

int64_t uncut_elements(const TensorSpec& t, const Unit& unit) {
  const int64_t whole = std::max<int64_t>(1, t.numel());
  if (unit.kind == UnitKind::row) return std::min(t.row(), whole);
  if (unit.kind != UnitKind::block) return 1;
  if (unit.block < 1)
    raise<ConfigError>("{}: wanted blocks of at least 1 element, got {}", t.name, unit.block);
  return std::min(unit.block, whole);
}

}  // namespace dovetail

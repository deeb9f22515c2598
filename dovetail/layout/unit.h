// Units of update operations: the smallest parts of a tensor that an operation needs complete.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/interval.h"
#include "dovetail/layout/tensor_spec.h"

namespace dovetail {

enum class UnitKind : uint8_t {
  element,  // any run of elements
  block,    // runs of `block` elements of the global tensor, counted from its start
  row,      // TensorSpec::row() elements
  matrix,   // the tensor as out x rest; of fused experts, each expert's matrix
  node,     // each node of a named kind: "head", "expert", or one of TensorSpec::nodes
  tile,     // the parts of each matrix, at most tile_rows x tile_columns, counted from its corner
};

struct Unit {
  UnitKind kind = UnitKind::element;
  int64_t block = 1;                       // for block
  std::string node = {};                   // for node
  int64_t tile_rows = 1, tile_columns = 1; // for tile
  bool operator==(const Unit&) const = default;

  static Unit of_block(int64_t elements) { return {.kind = UnitKind::block, .block = elements}; }
  static Unit of_row() { return {.kind = UnitKind::row}; }
  static Unit of_matrix() { return {.kind = UnitKind::matrix}; }
  static Unit of_node(std::string name) { return {.kind = UnitKind::node, .node = std::move(name)}; }
  static Unit of_tile(int64_t rows, int64_t columns) {
    return {.kind = UnitKind::tile, .tile_rows = rows, .tile_columns = columns};
  }

  // Assembled by one rank: matrices, nodes and tiles. Elements, blocks and rows are worked on where they lie: the
  // planner never cuts the latter two.
  bool is_assembled() const { return kind >= UnitKind::matrix; }
  std::string describe() const;  // "matrix", "block of 256", "node head", "tile of 1024 x 1024"
};

// One unit as a matrix over a row-major tensor: its element (r, c) is the tensor's first + r*stride + c.
struct UnitPlace {
  int64_t first = 0, rows = 0, columns = 0, stride = 0;

  int64_t numel() const { return rows * columns; }
  bool contiguous() const { return rows <= 1 || stride == columns; }
  // From its first to past its last element of the tensor; empty for a unit without elements.
  Interval span() const;
  // Those of its elements, counted row by row from 0 ("packed"), that lie in an interval of the tensor: always one run.
  Interval packed_in(Interval held) const;
  // Runs of the tensor that hold the packed elements.
  IntervalList runs(Interval packed) const;
  bool operator==(const UnitPlace&) const = default;
};

// The units of a tensor, in the order of their first elements' rows and columns. Only for units that are assembled;
// none for a tensor without elements. Throws ConfigError for a tensor without such nodes and for nodes or heads that
// do not divide it.
std::vector<UnitPlace> unit_places(const TensorSpec& tensor, const Unit& unit);

// Elements that no shard boundary may cut, for units that are worked on where they lie; 1 for all others.
int64_t uncut_elements(const TensorSpec& tensor, const Unit& unit);

}  // namespace dovetail

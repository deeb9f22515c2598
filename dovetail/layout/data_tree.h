// Views over one allocation. The root is the allocation; every other node names a part of its parent.
// Children of one node may read the same bytes with other shapes and boundaries: a fused QKV weight, its
// heads, and its 32-row tiles are three children of one run of elements. A tree is a plain value;
// storage/views makes tensors of it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/base/interval.h"

namespace dovetail {

struct DataNode {
  std::string name;              // one path component, unique among siblings; no '/'
  int64_t offset = 0;            // bytes from the start of the allocation
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // elements
  DType dtype = DType::f32;
  int64_t parent = -1;           // index of the parent; -1 for the root
  bool operator==(const DataNode&) const = default;
};

class DataTree {
 public:
  // A root of `bytes` bytes.
  DataTree(std::string name, int64_t bytes);

  // Adds a view below `parent` (0 = the root) and returns its index. Throws PlanError when a sibling has the
  // name, when it reaches outside of its parent's extent, or when the offset is no multiple of the element
  // size.
  int64_t add(int64_t parent, DataNode node);
  // A contiguous view.
  int64_t add_contiguous(int64_t parent, std::string name, int64_t offset, std::vector<int64_t> shape, DType dtype);

  const std::string& name() const { return nodes_[0].name; }
  int64_t bytes() const { return bytes_; }
  int64_t size() const { return static_cast<int64_t>(nodes_.size()); }
  const DataNode& node(int64_t index) const { return nodes_.at(index); }
  // "q_proj/head.3" below the root; -1 when there is none.
  int64_t find(std::string_view path) const;
  std::vector<int64_t> children(int64_t index) const;
  std::string path(int64_t index) const;

  // The bytes that a node can touch: from its first to past its last element; empty for a node without
  // elements.
  Interval extent(int64_t index) const;
  // The runs of bytes it covers, merged and ascending: a head of an output projection is a set of columns.
  IntervalList runs(int64_t index) const;

  std::string to_text() const;
  static DataTree parse(std::string_view text);  // the inverse; throws PlanError with the line number
  bool operator==(const DataTree&) const = default;

 private:
  int64_t bytes_;
  std::vector<DataNode> nodes_;
};

// The intervals of elements of a row-major tensor that form its unit number `index` of `count` along
// dimension `dim` (heads, experts): one run for dim 0, a run per row of the outer dimensions otherwise.
IntervalList unit_intervals(const std::vector<int64_t>& shape, int dim, int64_t count, int64_t index);

}  // namespace dovetail

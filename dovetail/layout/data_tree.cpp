#include "dovetail/layout/data_tree.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/layout/text.h"

namespace dovetail {
namespace {

int64_t product(const std::vector<int64_t>& v) {
  return std::accumulate(v.begin(), v.end(), int64_t{1}, std::multiplies<>());
}

IntervalList merged(IntervalList runs) {
  std::sort(runs.begin(), runs.end());
  IntervalList out;
  for (Interval run : runs) {
    if (!out.empty() && run.begin <= out.back().end)
      out.back().end = std::max(out.back().end, run.end);
    else
      out.push_back(run);
  }
  return out;
}

// Bytes from the first to past the last element; false when that number does not fit.
bool span_bytes(const DataNode& node, int64_t& bytes) {
  bytes = size_of(node.dtype);
  if (product(node.shape) == 0) return bytes = 0, true;
  for (size_t d = 0; d < node.shape.size(); ++d) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(node.shape[d] - 1, node.strides[d], &reach) ||
        __builtin_mul_overflow(reach, size_of(node.dtype), &reach) || __builtin_add_overflow(bytes, reach, &bytes))
      return false;
  }
  return true;
}

void check_shape(const DataNode& node, const std::string& path) {
  if (node.shape.size() != node.strides.size())
    raise<PlanError>("data tree: {}: {} dimensions but {} strides", path, node.shape.size(), node.strides.size());
  int64_t count = 1;
  for (size_t d = 0; d < node.shape.size(); ++d)
    if (node.shape[d] < 0 || node.strides[d] < 0 || __builtin_mul_overflow(count, node.shape[d], &count))
      raise<PlanError>("data tree: {}: wanted sizes and strides of at least 0, got {} and {}", path,
                       list_text(node.shape), list_text(node.strides));
  if (node.offset % size_of(node.dtype) != 0)
    raise<PlanError>("data tree: {}: offset {} is no multiple of the {} bytes of {}", path, node.offset,
                     size_of(node.dtype), name_of(node.dtype));
}

}  // namespace

DataTree::DataTree(std::string name, int64_t bytes) : bytes_(bytes) {
  if (bytes < 0) raise<PlanError>("data tree: {}: wanted at least 0 bytes, got {}", name, bytes);
  nodes_.push_back({std::move(name), 0, {bytes}, {1}, DType::u8, -1});
}

int64_t DataTree::add(int64_t parent, DataNode node) {
  if (parent < 0 || parent >= size())
    raise<PlanError>("data tree: {}: no parent {} among {} nodes", node.name, parent, size());
  node.parent = parent;
  if (node.name.empty() || node.name.find('/') != std::string::npos)
    raise<PlanError>("data tree: wanted a name without '/', got \"{}\"", node.name);
  const std::string where = (parent == 0 ? "" : path(parent) + "/") + node.name;
  for (int64_t child : children(parent))
    if (nodes_[child].name == node.name) raise<PlanError>("data tree: {} is there already", where);
  check_shape(node, where);
  const Interval outer = extent(parent);
  int64_t bytes = 0;
  if (!span_bytes(node, bytes) || node.offset < outer.begin || bytes > outer.end - node.offset)
    raise<PlanError>("data tree: {}: {} bytes from {} on reach outside of its parent's [{}, {})", where, bytes,
                     node.offset, outer.begin, outer.end);
  nodes_.push_back(std::move(node));
  return size() - 1;
}

int64_t DataTree::add_contiguous(int64_t parent, std::string name, int64_t offset, std::vector<int64_t> shape,
                                 DType dtype) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    if (__builtin_mul_overflow(stride, std::max<int64_t>(1, shape[d]), &stride))
      raise<PlanError>("data tree: {}: shape {} is too large", name, list_text(shape));
  }
  return add(parent, {std::move(name), offset, std::move(shape), std::move(strides), dtype, parent});
}

int64_t DataTree::find(std::string_view path) const {
  int64_t at = 0;
  while (!path.empty()) {
    const std::string_view part = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(path.size(), part.size() + 1));
    int64_t next = -1;
    for (int64_t child : children(at))
      if (nodes_[child].name == part) next = child;
    if (next < 0) return -1;
    at = next;
  }
  return at;
}

std::vector<int64_t> DataTree::children(int64_t index) const {
  std::vector<int64_t> found;
  for (int64_t i = index + 1; i < size(); ++i)
    if (nodes_[i].parent == index) found.push_back(i);
  return found;
}

std::string DataTree::path(int64_t index) const {
  std::string path;
  for (; index != 0; index = node(index).parent) path = node(index).name + (path.empty() ? "" : "/") + path;
  return path;
}

Interval DataTree::extent(int64_t index) const {
  const DataNode& n = node(index);
  int64_t bytes = 0;
  span_bytes(n, bytes);
  return {n.offset, n.offset + bytes};
}

IntervalList DataTree::runs(int64_t index) const {
  const DataNode& n = node(index);
  if (extent(index).empty()) return {};
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes, size; the finest first
  for (size_t d = 0; d < n.shape.size(); ++d)
    if (n.shape[d] > 1) dims.push_back({n.strides[d] * size_of(n.dtype), n.shape[d]});
  std::sort(dims.begin(), dims.end());
  int64_t run = size_of(n.dtype);
  size_t d = 0;
  for (; d < dims.size() && dims[d].first <= run; ++d) run += dims[d].first * (dims[d].second - 1);
  IntervalList found{{n.offset, n.offset + run}};
  for (; d < dims.size(); ++d) {
    IntervalList copies;
    for (int64_t i = 0; i < dims[d].second; ++i)
      for (Interval part : found) copies.push_back(part.shifted(i * dims[d].first));
    found = merged(std::move(copies));
  }
  return found;
}

std::string DataTree::to_text() const {
  std::string text = fmt::format("tree {} bytes {}\n", quoted_name(name()), bytes_);
  for (int64_t i = 1; i < size(); ++i) {
    const DataNode& n = nodes_[i];
    text += fmt::format("node {} parent {} {} offset {} {} shape {} strides {}\n", i, n.parent, quoted_name(n.name),
                        n.offset, name_of(n.dtype), list_text(n.shape), list_text(n.strides));
  }
  return text + "end\n";
}

DataTree DataTree::parse(std::string_view text) {
  TextReader reader(text, "data tree");
  reader.need_line("\"tree\"");
  reader.expect("tree");
  std::string name = reader.name();
  reader.expect("bytes");
  DataTree tree(std::move(name), reader.number());
  for (reader.need_line("\"node\" or \"end\""); reader.peek() != "end"; reader.need_line("\"node\" or \"end\"")) {
    DataNode n;
    reader.expect("node");
    reader.number(tree.size(), tree.size());
    reader.expect("parent");
    n.parent = reader.number(0, tree.size() - 1);
    n.name = reader.name();
    reader.expect("offset");
    n.offset = reader.number();
    const std::string_view dtype = reader.word("a dtype");
    reader.expect("shape");
    n.shape = reader.list();
    reader.expect("strides");
    n.strides = reader.list();
    try {
      n.dtype = parse_dtype(dtype);
      tree.add(n.parent, std::move(n));
    } catch (const Error& e) {
      reader.fail(e.what());
    }
  }
  reader.expect("end");
  if (reader.next_line()) reader.fail("wanted nothing after \"end\"");
  return tree;
}

IntervalList unit_intervals(const std::vector<int64_t>& shape, int dim, int64_t count, int64_t index) {
  if (dim < 0 || dim >= std::ssize(shape))
    raise<ConfigError>("units: wanted a dimension of {}, got {}", list_text(shape), dim);
  if (count < 1 || shape[dim] % count != 0 || index < 0 || index >= count)
    raise<ConfigError>("units: {} along dimension {} are not made of {} equal units with number {}", shape[dim], dim,
                       count, index);
  const int64_t inner = product({shape.begin() + dim + 1, shape.end()});
  const int64_t outer = product({shape.begin(), shape.begin() + dim});
  const int64_t width = shape[dim] / count * inner;
  if (width == 0) return {};
  IntervalList runs;
  for (int64_t o = 0; o < outer; ++o) {
    const int64_t begin = o * shape[dim] * inner + index * width;
    runs.push_back({begin, begin + width});
  }
  return merged(std::move(runs));
}

}  // namespace dovetail

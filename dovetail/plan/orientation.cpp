#include "dovetail/plan/orientation.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace dovetail::plan {
namespace {

constexpr int64_t kThin = 4;  // a matrix with a side of base / kThin or less is filler, not bulk

bool has_rows(const TensorSpec& t) {
  return (t.kind == ParamKind::matrix && t.shape.size() == 2) ||
         (t.kind == ParamKind::expert && t.shape.size() == 3);
}

bool wants_transposing(const TensorSpec& t, int64_t base, int64_t alignment) {
  const int64_t rows = t.shape[t.shape.size() - 2], columns = t.shape.back();
  const bool thin = t.kind == ParamKind::matrix && std::min(rows, columns) <= base / kThin;
  if (!thin && columns == base) return false;
  if (!thin && rows == base) return true;
  // A cut lies at whole rows and at a multiple of the alignment: lengths of both, in the latter.
  return rows / std::gcd(rows, alignment) < columns / std::gcd(columns, alignment);
}

}  // namespace

int64_t base_length(const Inventory& model) {
  std::map<int64_t, int64_t> elements;
  for (const InventoryGroup& g : model.groups)
    for (const TensorSpec& t : g.tensors) {
      if (!has_rows(t)) continue;
      const int64_t rows = t.shape[t.shape.size() - 2], columns = t.shape.back();
      elements[rows] += t.numel() * g.repeat;
      if (columns != rows) elements[columns] += t.numel() * g.repeat;
    }
  int64_t base = 0, most = 0;
  for (auto [length, count] : elements)
    if (count > most) base = length, most = count;
  return base;
}

std::vector<TensorSpec> oriented(std::vector<TensorSpec> tensors, int64_t base, int64_t alignment) {
  for (TensorSpec& t : tensors) {
    if (!has_rows(t) || t.numel() == 0 || !wants_transposing(t, base, alignment)) continue;
    std::swap(t.shape[t.shape.size() - 2], t.shape.back());
    t.heads = t.heads_dim = 0;
  }
  return tensors;
}

std::vector<TensorSpec> split_experts(const std::vector<TensorSpec>& tensors, BlockKind kind) {
  std::vector<TensorSpec> r;
  for (const TensorSpec& t : tensors) {
    const bool fused = t.kind == ParamKind::expert && t.shape.size() >= 2 && t.shape[0] > 0;
    if (!fused || block_elements(t, kind) <= t.numel() / t.shape[0]) {
      r.push_back(t);
      continue;
    }
    TensorSpec one = t;
    one.shape[0] = 1;
    if (t.shape.size() == 2) one.shape = {t.shape[1]}, one.kind = ParamKind::vector;
    for (int64_t i = 0; i < t.shape[0]; ++i) {
      one.name = fmt::format("{}[{}]", t.name, i);
      r.push_back(one);
    }
  }
  return r;
}

}  // namespace dovetail::plan

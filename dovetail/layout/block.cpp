#include "dovetail/layout/block.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr std::array<std::pair<BlockKind, std::string_view>, 7> kKinds{{{BlockKind::element, "element"},
                                                                        {BlockKind::row, "row"},
                                                                        {BlockKind::rows32, "32-row"},
                                                                        {BlockKind::rows128, "128-row"},
                                                                        {BlockKind::head, "head"},
                                                                        {BlockKind::expert, "expert"},
                                                                        {BlockKind::matrix, "matrix"}}};

int64_t rows_block(const TensorSpec& t, int64_t rows) {
  if (t.kind == ParamKind::expert && t.shape.size() == 3) {
    const int64_t expert = t.shape[1] * t.shape[2];
    return t.shape[1] % rows == 0 ? rows * t.row() : expert;
  }
  return rows * t.row();
}

int64_t unclamped_block(const TensorSpec& t, BlockKind kind) {
  switch (kind) {
    case BlockKind::element: return 1;
    case BlockKind::row: return t.row();
    case BlockKind::rows32: return rows_block(t, 32);
    case BlockKind::rows128: return rows_block(t, 128);
    case BlockKind::head:
      return t.heads > 0 && t.heads_dim == 0 && t.shape[0] % t.heads == 0 ? t.shape[0] / t.heads * t.row() : t.row();
    case BlockKind::expert: return t.kind == ParamKind::expert ? t.numel() / std::max<int64_t>(1, t.shape[0]) : t.row();
    case BlockKind::matrix: return t.kind == ParamKind::embedding ? t.row() : t.numel();
  }
  return 1;
}

}  // namespace

std::string_view name_of(BlockKind kind) {
  for (auto [k, name] : kKinds)
    if (k == kind) return name;
  return "?";
}

BlockKind parse_block_kind(std::string_view text) {
  for (auto [k, name] : kKinds)
    if (name == text) return k;
  raise<ConfigError>("block: wanted element, row, 32-row, 128-row, head, expert or matrix; got \"{}\"", text);
}

int64_t block_elements(const TensorSpec& t, BlockKind kind) {
  if (t.shape.size() < 2 || t.kind == ParamKind::vector) return 1;
  return std::clamp<int64_t>(unclamped_block(t, kind), 1, std::max<int64_t>(1, t.numel()));
}

int64_t common_block(const TensorSpec& t, int64_t a, int64_t b) {
  if (a < 1 || b < 1) raise<ConfigError>("{}: wanted blocks of at least 1 element, got {}", t.name, std::min(a, b));
  const int64_t whole = std::max<int64_t>(1, t.numel()), factor = b / std::gcd(a, b);
  return factor > whole / a ? whole : a * factor;
}

}  // namespace dovetail

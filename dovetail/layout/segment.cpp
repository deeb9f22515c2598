#include "dovetail/layout/segment.h"

#include <algorithm>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

void verify_degrees(const SegmentLayout& l) {
  const bool positive = l.zero3 >= 1 && l.zero2 >= 1 && l.zero1 >= 1;
  if (!positive || l.zero2 % l.zero3 != 0 || l.zero1 % l.zero2 != 0)
    raise<PlanError>("layout: wanted zero3 | zero2 | zero1, got zero1 {}, zero2 {}, zero3 {}", l.zero1, l.zero2,
                     l.zero3);
}

void verify_shards(const SegmentLayout& l) {
  if (l.shard1 < 0 || l.shard2 < 0 || l.shard3 < 0)
    raise<PlanError>("layout: wanted shards of 0 or more elements, got {}, {}, {}", l.shard1, l.shard2, l.shard3);
  const int64_t fine = l.zero2 / l.zero3, finer = l.zero1 / l.zero2;
  if (l.shard2 * fine != l.shard3)
    raise<PlanError>("layout: {} zero2 shards of {} elements do not make a zero3 shard of {}", fine, l.shard2,
                     l.shard3);
  if (l.shard1 * finer < l.shard2 || l.shard1 > l.shard2)
    raise<PlanError>("layout: {} zero1 shards of {} elements do not divide a zero2 shard of {}", finer, l.shard1,
                     l.shard2);
  if (l.bound < 0 || l.bound > l.shard3)
    raise<PlanError>("layout: wanted a lower bound between 0 and the zero3 shard {}, got {}", l.shard3, l.bound);
}

// The first shard boundary of any level after x.
int64_t boundary_after(const SegmentLayout& l, int64_t x) {
  const int64_t base = x / l.shard2 * l.shard2;
  return std::min(base + ((x - base) / l.shard1 + 1) * l.shard1, base + l.shard2);
}

void verify_blocks(const SegmentLayout& l, const Placement& p) {
  if (p.block == 1 || p.numel == 0) return;
  for (int64_t b = boundary_after(l, p.offset); b < p.offset + p.numel; b = boundary_after(l, b))
    if ((b - p.offset) % p.block != 0)
      raise<PlanError>("layout: tensor {}: shard boundary {}, {} elements after its start, cuts a block of {}",
                       p.tensor, b, b - p.offset, p.block);
}

void verify_unique(const SegmentLayout& l) {
  std::vector<int64_t> seen;
  for (const Placement& p : l.placements) seen.push_back(p.tensor);
  std::sort(seen.begin(), seen.end());
  const auto twice = std::adjacent_find(seen.begin(), seen.end());
  if (twice != seen.end()) raise<PlanError>("layout: tensor {} is placed twice", *twice);
}

}  // namespace

Interval SegmentLayout::zero1_interval(int64_t q) const {
  const int64_t ratio = zero1 / zero2, s = q / ratio, j = q % ratio;
  const int64_t begin = std::min(j * shard1, shard2), end = std::min(begin + shard1, shard2);
  return {s * shard2 + begin, s * shard2 + end};
}

void verify(const SegmentLayout& layout) {
  verify_degrees(layout);
  verify_shards(layout);
  verify_unique(layout);
  int64_t end = 0;
  for (const Placement& p : layout.placements) {
    if (p.tensor < 0 || p.numel < 0 || p.block < 1 || p.block > std::max<int64_t>(1, p.numel))
      raise<PlanError>("layout: tensor {}: {} elements in blocks of {}", p.tensor, p.numel, p.block);
    if (p.offset < end)
      raise<PlanError>("layout: tensor {} starts at {}, before the end {} of the one before it", p.tensor, p.offset,
                       end);
    end = p.offset + p.numel;
    if (end > layout.size())
      raise<PlanError>("layout: tensor {} ends at {}, past the {} elements of the segment", p.tensor, end,
                       layout.size());
    verify_blocks(layout, p);
  }
}

}  // namespace dovetail

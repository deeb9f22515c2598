#include "dovetail/layout/shard_chain.h"

#include <string_view>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr std::array<std::string_view, kLevels> kNames{"whole", "zero3", "zero2", "zero1"};

}  // namespace

ShardChain::ShardChain(const SegmentLayout& layout, const Placement& placement, int64_t zero3_shard,
                       int64_t zero2_shard, int64_t zero1_shard) {
  DT_CHECK_EQ(zero2_shard / (layout.zero2 / layout.zero3), zero3_shard, "zero2 shard {}", zero2_shard);
  DT_CHECK_EQ(zero1_shard / (layout.zero1 / layout.zero2), zero2_shard, "zero1 shard {}", zero1_shard);
  DT_CHECK(0 <= zero3_shard && zero3_shard < layout.zero3, "zero3 shard {} of {}", zero3_shard, layout.zero3);
  const std::array<Interval, kLevels> shards{Interval{0, layout.size()}, layout.zero3_interval(zero3_shard),
                                             layout.zero2_interval(zero2_shard), layout.zero1_interval(zero1_shard)};
  for (int level = 0; level < kLevels; ++level) {
    const Interval part = intersect(placement.interval(), shards[level]);
    if (part.empty()) continue;
    held_[level] = part.shifted(-placement.offset);
    offset_[level] = part.begin - shards[level].begin;
  }
}

int64_t ShardChain::to_original(Level level, int64_t local) const {
  const Interval here = held(level);
  DT_CHECK(0 <= local && local < here.size(), "element {} of the {} held at {}", local, here.size(),
           kNames[static_cast<int>(level)]);
  return here.begin + local;
}

int64_t ShardChain::to_local(Level level, int64_t original) const {
  const Interval here = held(level);
  DT_CHECK(here.contains(original), "element {} is not in [{},{}), held at {}", original, here.begin, here.end,
           kNames[static_cast<int>(level)]);
  return original - here.begin;
}

int64_t ShardChain::convert(Level from, int64_t local, Level to) const {
  return to_local(to, to_original(from, local));
}

std::string ShardChain::to_text() const {
  std::string text = fmt::format("whole[{},{})", held_[0].begin, held_[0].end);
  for (int level = 1; level < kLevels; ++level)
    text += fmt::format(" {}[{},{})@{}", kNames[level], held_[level].begin, held_[level].end, offset_[level]);
  return text;
}

}  // namespace dovetail

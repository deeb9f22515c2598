#include "dovetail/plan/lower_bound.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "dovetail/base/math.h"

namespace dovetail::plan {
namespace {

constexpr int kMaxK = 40;
using Wide = __int128;  // products of extents, counts and k overflow 64 bits on large models

struct Blocks {
  int64_t size;
  int64_t count;
};

// Largest first.
std::vector<Blocks> blocks_of(const TensorTypes& types) {
  std::vector<Blocks> blocks;
  for (const TensorType& t : types.types) {
    const int64_t whole = t.shape.extent / t.shape.block, rest = t.shape.extent % t.shape.block;
    if (whole > 0) blocks.push_back({t.shape.block, whole * t.count});
    if (rest > 0) blocks.push_back({rest, t.count});
  }
  std::sort(blocks.begin(), blocks.end(), [](Blocks a, Blocks b) { return a.size > b.size; });
  return blocks;
}

// sum of u_k(size/s) <= shards, in units of 1/(k*s): u_k(x) = x where (k+1)x is whole, else
// floor((k+1)x)/k.
bool rounding_refuses(const std::vector<Blocks>& blocks, int64_t shards, int64_t s, int k) {
  Wide sum = 0;
  for (Blocks b : blocks) {
    const int64_t scaled = (k + 1) * b.size;
    sum += Wide(b.count) * (scaled % s == 0 ? Wide(b.size) * k : Wide(scaled / s) * s);
  }
  return sum > Wide(shards) * k * s;
}

// Blocks over s - least fill a shard alone, those below `least` count nothing.
bool threshold_refuses(const std::vector<Blocks>& blocks, int64_t shards, int64_t s,
                       int64_t least) {
  Wide sum = 0;
  for (Blocks b : blocks) {
    if (b.size < least) break;
    sum += Wide(b.count) * (b.size > s - least ? s : b.size);
  }
  return sum > Wide(shards) * s;
}

bool duals_refuse(const std::vector<Blocks>& blocks, int64_t shards, int64_t s) {
  for (int k = 1; k <= kMaxK; ++k) {
    if ((k + 1) * blocks.front().size < s) continue;  // every block rounds down to nothing
    if (rounding_refuses(blocks, shards, s, k)) return true;
  }
  for (Blocks b : blocks)
    if (2 * b.size <= s && threshold_refuses(blocks, shards, s, b.size)) return true;
  return false;
}

int64_t counting_bound(const TensorTypes& types, const std::vector<Blocks>& blocks,
                       int64_t shards) {
  if (blocks.empty()) return 0;
  int64_t bound = std::max(ceil_div(types.total, shards), blocks.front().size);
  int64_t at_least = 0;
  for (Blocks b : blocks) {
    at_least += b.count;
    bound = std::max(bound, b.size * ceil_div(at_least, shards));
  }
  return bound;
}

}  // namespace

int64_t counting_bound(const TensorTypes& types, int64_t shards) {
  return counting_bound(types, blocks_of(types), shards);
}

int64_t block_bound(const TensorTypes& types, int64_t shards) {
  const std::vector<Blocks> blocks = blocks_of(types);
  const int64_t bound = counting_bound(types, blocks, shards);
  if (blocks.empty() || (kMaxK + 1) * blocks.front().size < bound ||
      !duals_refuse(blocks, shards, bound))
    return bound;
  // Fitting is monotone in s although a dual test is not: any refused size rules out all smaller
  // ones.
  int64_t refused = bound, passed = 2 * bound;
  while (duals_refuse(blocks, shards, passed)) refused = std::exchange(passed, 2 * passed);
  while (passed - refused > 1) {
    const int64_t middle = refused + (passed - refused) / 2;
    (duals_refuse(blocks, shards, middle) ? refused : passed) = middle;
  }
  return passed;
}

}  // namespace dovetail::plan

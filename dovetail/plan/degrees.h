// Degrees of sharding and the grid of ranks that they make.
//
// rank = i3 + zero3*(i2 + (zero2/zero3)*(i1 + (zero1/zero2)*replica)), innermost digit first. Shards nest:
// the zero3 shard of a rank is number i3, its zero2 shard number i3*(zero2/zero3) + i2, its zero1 shard
// number (i3*(zero2/zero3) + i2)*(zero1/zero2) + i1.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace dovetail::plan {

struct Degrees {
  int64_t zero1 = 1;  // ranks that share main weights and optimizer state
  int64_t zero2 = 1;  // ranks that share reduced gradients
  int64_t zero3 = 1;  // ranks that share runtime parameters
  bool operator==(const Degrees&) const = default;
};

// Throws ConfigError naming the numbers unless zero3 | zero2 | zero1 | world and all are positive.
void validate(const Degrees& degrees, int64_t world);

// Every legal chain for a world size, in ascending order of (zero1, zero2, zero3).
std::vector<Degrees> legal_chains(int64_t world);

struct GridPosition {
  int64_t i3 = 0, i2 = 0, i1 = 0, replica = 0;
  bool operator==(const GridPosition&) const = default;
};
GridPosition position_of(const Degrees& degrees, int64_t rank);
int64_t rank_at(const Degrees& degrees, const GridPosition& position);

int64_t zero3_shard(const Degrees& degrees, const GridPosition& p);
int64_t zero2_shard(const Degrees& degrees, const GridPosition& p);
int64_t zero1_shard(const Degrees& degrees, const GridPosition& p);
// The rank that holds a zero1 shard in one replica.
int64_t rank_of(const Degrees& degrees, int64_t zero1_shard, int64_t replica);

// The process groups: lists of ranks that partition the world, each in shard order.
enum class RankGroup : uint8_t {
  gather,       // zero3 ranks that hold one copy of the runtime parameters, by zero3 shard
  reduce,       // zero2 ranks that hold one copy of the reduced gradients, by zero2 shard
  refresh,      // zero1/zero3 ranks that share a zero3 shard, by zero1 shard
  reduce_main,  // zero1/zero2 ranks that share a zero2 shard, by zero1 shard
  replica,      // world/zero1 ranks that hold the same zero1 shard, by replica
  main,         // zero1 ranks that hold one copy of the main weights, by zero1 shard
};
std::vector<std::vector<int>> rank_groups(const Degrees& degrees, int64_t world, RankGroup kind);

std::string to_text(const Degrees& degrees);  // "4,2,2"

}  // namespace dovetail::plan

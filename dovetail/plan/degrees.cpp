#include "dovetail/plan/degrees.h"

#include <algorithm>

#include "dovetail/base/error.h"

namespace dovetail::plan {
namespace {

std::vector<int64_t> divisors(int64_t n) {
  std::vector<int64_t> found;
  for (int64_t d = 1; d <= n / d; ++d) {
    if (n % d != 0) continue;
    found.push_back(d);
    if (d != n / d) found.push_back(n / d);
  }
  std::sort(found.begin(), found.end());
  return found;
}

// The digits that members of a group have in common; those that vary are 0.
GridPosition shared_digits(RankGroup kind, GridPosition p) {
  switch (kind) {
    case RankGroup::gather: p.i3 = 0; break;
    case RankGroup::reduce: p.i3 = p.i2 = 0; break;
    case RankGroup::refresh: p.i2 = p.i1 = 0; break;
    case RankGroup::reduce_main: p.i1 = 0; break;
    case RankGroup::replica: p.replica = 0; break;
    case RankGroup::main: p.i3 = p.i2 = p.i1 = 0; break;
  }
  return p;
}

// What members are ordered by: their zero1 shard says the same as the coarser one that a group
// shares, or varies over.
int64_t member_order(const Degrees& d, RankGroup kind, const GridPosition& p) {
  return kind == RankGroup::replica ? p.replica : zero1_shard(d, p);
}

}  // namespace

void validate(const Degrees& d, int64_t world) {
  const bool positive = d.zero1 > 0 && d.zero2 > 0 && d.zero3 > 0 && world > 0;
  if (!positive || d.zero2 % d.zero3 != 0 || d.zero1 % d.zero2 != 0 || world % d.zero1 != 0)
    raise<ConfigError>("degrees: wanted zero3 | zero2 | zero1 | world (each divides the next), got zero3 {}, zero2 {}, "
                       "zero1 {}, world {}",
                       d.zero3, d.zero2, d.zero1, world);
}

std::vector<Degrees> legal_chains(int64_t world) {
  if (world < 1) raise<ConfigError>("world: wanted at least 1 rank, got {}", world);
  std::vector<Degrees> chains;
  for (int64_t zero1 : divisors(world))
    for (int64_t zero2 : divisors(zero1))
      for (int64_t zero3 : divisors(zero2)) chains.push_back({zero1, zero2, zero3});
  return chains;
}

GridPosition position_of(const Degrees& d, int64_t rank) {
  DT_CHECK_GE(rank, 0);
  return {rank % d.zero3, rank / d.zero3 % (d.zero2 / d.zero3), rank / d.zero2 % (d.zero1 / d.zero2), rank / d.zero1};
}

int64_t rank_at(const Degrees& d, const GridPosition& p) {
  return p.i3 + d.zero3 * (p.i2 + d.zero2 / d.zero3 * (p.i1 + d.zero1 / d.zero2 * p.replica));
}

int64_t zero3_shard(const Degrees&, const GridPosition& p) { return p.i3; }

int64_t zero2_shard(const Degrees& d, const GridPosition& p) { return p.i3 * (d.zero2 / d.zero3) + p.i2; }

int64_t zero1_shard(const Degrees& d, const GridPosition& p) {
  return zero2_shard(d, p) * (d.zero1 / d.zero2) + p.i1;
}

int64_t rank_of(const Degrees& d, int64_t shard, int64_t replica) {
  const int64_t n2 = d.zero2 / d.zero3, n1 = d.zero1 / d.zero2;
  return rank_at(d, {.i3 = shard / n1 / n2, .i2 = shard / n1 % n2, .i1 = shard % n1, .replica = replica});
}

std::vector<std::vector<int>> rank_groups(const Degrees& d, int64_t world, RankGroup kind) {
  validate(d, world);
  std::vector<std::vector<int>> groups;
  std::vector<int64_t> group_at(world, -1);  // by the lowest rank of the group
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t lowest = rank_at(d, shared_digits(kind, position_of(d, rank)));
    if (group_at[lowest] < 0) {
      group_at[lowest] = std::ssize(groups);
      groups.emplace_back();
    }
    groups[group_at[lowest]].push_back(static_cast<int>(rank));
  }
  for (std::vector<int>& group : groups)
    std::sort(group.begin(), group.end(), [&](int a, int b) {
      return member_order(d, kind, position_of(d, a)) < member_order(d, kind, position_of(d, b));
    });
  return groups;
}

std::string to_text(const Degrees& d) { return fmt::format("{},{},{}", d.zero1, d.zero2, d.zero3); }

}  // namespace dovetail::plan

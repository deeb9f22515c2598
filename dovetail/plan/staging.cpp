#include "dovetail/plan/staging.h"

#include <algorithm>

#include "dovetail/base/math.h"

namespace dovetail::plan {
namespace {

constexpr int64_t kAlignment = 64;

}  // namespace

std::vector<UnitBatch> unit_batches(const Plan& plan, const std::vector<UnitDemand>& demands,
                                    const OwnerPlan& owners) {
  const std::vector<TensorPlace> tensors = tensor_places(plan);
  std::vector<UnitBatch> batches;
  for (int64_t i = 0; i < std::ssize(owners.units); ++i) {
    const UnitDemand& demand = demands[owners.units[i].demand];
    const int64_t g = tensors[demand.tensor].group;
    if (batches.empty() || batches.back().group != g || batches.back().op != demand.op)
      batches.push_back({g, demand.op, i, i});
    batches.back().end = i + 1;
  }
  return batches;
}

UnitRole role_of(const Plan& plan, const OwnedUnit& unit, int64_t rank) {
  const GridPosition position = position_of(plan.options.degrees, rank);
  const int64_t shard = zero1_shard(plan.options.degrees, position);
  UnitRole role;
  for (int64_t f = 0; f < std::ssize(unit.fragments); ++f)
    if (unit.fragments[f].shard == shard) role.fragment = f;
  role.owner =
      unit.owner == shard && (unit.replica == kEveryReplica || unit.replica == position.replica);
  return role;
}

BatchStaging stage(const Plan& plan, const std::vector<UnitDemand>& demands,
                   const OwnerPlan& owners, const UnitBatch& batch, int64_t rank) {
  BatchStaging result;
  auto take = [&](int64_t bytes) {
    const int64_t at = result.bytes;
    result.bytes += round_up(bytes, kAlignment);
    return at;
  };
  for (int64_t i = batch.begin; i < batch.end; ++i) {
    const OwnedUnit& u = owners.units[i];
    const UnitDemand& demand = demands[u.demand];
    const UnitPlace& place = demand.places[u.number];
    UnitStaging s{.role = role_of(plan, u, rank), .packed = {}, .wire = {}};
    const UnitRole& role = s.role;
    const bool shared = u.replica != kEveryReplica;
    for (const UnitField& f : demand.fields) {
      s.packed.push_back(-1);
      s.wire.push_back(-1);
      const bool converts = f.wire != f.bytes;
      if (role.owner && !u.whole_at_owner()) {
        s.packed.back() = take(place.numel() * f.bytes);
        if (converts) s.wire.back() = take(place.numel() * f.wire);
      } else if (role.owner && shared && f.writes && (converts || !place.contiguous())) {
        s.wire.back() = take(place.numel() * f.wire);
      } else if (!role.owner && role.fragment >= 0) {
        const Interval packed = u.fragments[role.fragment].packed;
        if (converts || place.runs(packed).size() > 1) s.wire.back() = take(packed.size() * f.wire);
      }
    }
    result.units.push_back(std::move(s));
  }
  return result;
}

std::vector<int64_t> staging_slots(const Plan& plan, const std::vector<UnitDemand>& demands,
                                   const OwnerPlan& owners, int64_t rank) {
  const std::vector<UnitBatch> batches = unit_batches(plan, demands, owners);
  std::vector<int64_t> slots(kBatchesInFlight);
  for (size_t b = 0; b < batches.size(); ++b) {
    int64_t& slot = slots[b % kBatchesInFlight];
    slot = std::max(slot, stage(plan, demands, owners, batches[b], rank).bytes);
  }
  return slots;
}

void add_unit_bytes(const Plan& plan, const std::vector<UnitDemand>& demands,
                    const OwnerPlan& owners, int64_t rank, HeldBytes& held) {
  for (const OwnedUnit& u : owners.units) {
    if (!role_of(plan, u, rank).owner) continue;
    held.unit_state += demands[u.demand].state[u.number];
    held.workspace = std::max(held.workspace, demands[u.demand].workspace[u.number]);
  }
  for (int64_t slot : staging_slots(plan, demands, owners, rank)) held.staging += slot;
}

}  // namespace dovetail::plan

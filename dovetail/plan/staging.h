// Memory for units that are not whole where their owner needs them: predicted here, allocated by the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/plan/bytes.h"
#include "dovetail/plan/owners.h"

namespace dovetail::plan {

// Units that are exchanged and run together: one operation's in one group, units [begin, end) of the owner plan.
struct UnitBatch {
  int64_t group = 0;
  int64_t op = 0;
  int64_t begin = 0, end = 0;
};
std::vector<UnitBatch> unit_batches(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerPlan& owners);

// So many batches are under way at once: one arrives, one is computed, one goes back.
inline constexpr int64_t kBatchesInFlight = 3;

// Role of a rank for a unit: its number among the unit's fragments (-1: none), and whether it runs it.
struct UnitRole {
  int64_t fragment = -1;
  bool owner = false;
};
UnitRole role_of(const Plan& plan, const OwnedUnit& unit, int64_t rank);

// A unit's places in the staging memory of one rank, bytes; per field of the demand, -1 where it has none.
struct UnitStaging {
  UnitRole role;
  std::vector<int64_t> packed;  // at the owner of a unit that is not whole there: its elements, row by row
  std::vector<int64_t> wire;    // what is sent or received in another form or order than it is kept. At the owner all
                                // packed elements as they travel, at a holder those of its fragment
};

struct BatchStaging {
  std::vector<UnitStaging> units;  // of the batch, in order
  int64_t bytes = 0;
};
BatchStaging stage(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerPlan& owners,
                   const UnitBatch& batch, int64_t rank);

// Bytes of the slots of staging memory; batch number b uses slot b % kBatchesInFlight.
std::vector<int64_t> staging_slots(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerPlan& owners,
                                   int64_t rank);

// Adds what the units cost a rank: unit_state, staging, workspace.
void add_unit_bytes(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerPlan& owners, int64_t rank,
                    HeldBytes& held);

}  // namespace dovetail::plan

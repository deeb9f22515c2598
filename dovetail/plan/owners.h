// Who runs which assembled unit of an update operation, and what moves for it.
//
// A unit (a matrix, a head, an expert) lies on one or more zero1 shards; the part on one shard is a fragment. One rank,
// the owner, runs the operation on the whole unit: fields that the operation reads travel from the holders of the
// other fragments to the owner, fields that it writes travel back. Nothing else moves. Where several replicas hold the
// same shards they share the units among them when that is cheaper than repeating the work.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "dovetail/layout/unit.h"
#include "dovetail/plan/plan.h"

namespace dovetail::plan {

// A field of a unit as it is kept and as fragments of it travel, bytes per element.
struct UnitField {
  std::string name;
  int64_t bytes = 4;
  int64_t wire = 4;
  bool reads = false, writes = false;
  bool operator==(const UnitField&) const = default;
};

// What one operation needs of one tensor.
struct UnitDemand {
  int64_t tensor = 0;  // number in the plan
  int64_t op = 0;      // number in the optimizer's list of operations
  std::vector<UnitPlace> places;
  std::vector<double> cost;        // per unit, floating-point operations
  std::vector<int64_t> state;      // per unit, bytes that its owner keeps
  std::vector<int64_t> workspace;  // per unit, bytes of scratch
  std::vector<UnitField> fields;
  bool operator==(const UnitDemand&) const = default;

  int64_t wire_in() const;   // bytes per element of all fields read
  int64_t wire_out() const;  // of all fields written
};

struct OwnerOptions {
  // Floating-point operations that take as long as moving one byte between ranks. A formula's constant, the same for
  // every machine: plans must not depend on timing.
  double flops_per_byte = 64;
};

struct UnitFragment {
  int64_t shard = 0;  // zero1 shard
  Interval packed;    // of the unit's elements, row by row
  bool operator==(const UnitFragment&) const = default;
};

inline constexpr int64_t kEveryReplica = -1;

struct OwnedUnit {
  int64_t demand = 0;  // index into the demands
  int64_t number = 0;  // of the unit within its tensor
  std::vector<UnitFragment> fragments;  // ascending; together the whole unit
  int64_t owner = 0;                    // zero1 shard of the owner
  int64_t replica = kEveryReplica;      // of the owner; kEveryReplica: each replica's own rank runs it
  bool operator==(const OwnedUnit&) const = default;

  bool whole_at_owner() const { return fragments.size() == 1 && fragments[0].shard == owner; }
};

struct OwnerPlan {
  std::vector<OwnedUnit> units;  // by group, operation, tensor, number: the order of all messages
  std::vector<double> load;      // per rank: floating-point operations

  double imbalance() const;  // largest load over the mean; 1 when there is no work
  bool operator==(const OwnerPlan&) const = default;
};

// Goes through the groups in order and gives each unit, the dearest of a group first, to the rank that would
// be done first: with the work given to it so far, the unit's, and flops_per_byte for each byte that has to
// reach or leave it for this unit. Holders of larger fragments win ties, then lower elements. Replicas share a
// unit when its cost exceeds flops_per_byte for the bytes of its result. `demands`: at most one for each
// (tensor, operation). Throws ConfigError naming the tensor.
OwnerPlan assign_owners(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerOptions& options = {});

// The fragments of a unit; empty for a unit without elements.
std::vector<UnitFragment> fragments_of(const Plan& plan, int64_t tensor, const UnitPlace& place);

// Bytes of each field that one rank sends in a step.
std::map<std::string, int64_t> fragment_bytes(const Plan& plan, const std::vector<UnitDemand>& demands,
                                              const OwnerPlan& owners, int64_t rank);

// For people: units and work per rank, imbalance, bytes per field, and one line for each unit that is cut or runs on
// another rank than the one that holds it.
std::string owner_report(const Plan& plan, const std::vector<UnitDemand>& demands, const OwnerPlan& owners);

}  // namespace dovetail::plan

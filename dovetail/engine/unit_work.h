// The exchange and computation of one batch of assembled units on one rank (plan/staging.h).
//
// Fragments are sent from and received into the fields themselves wherever they are one run there and travel as they
// are kept; everything else passes through staging memory. Units that are whole at their owner are worked on in place.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "dovetail/engine/context.h"
#include "dovetail/engine/state_store.h"
#include "dovetail/engine/update_plan.h"

namespace dovetail::engine_detail {

// Where a rank's part of a parameter lies.
struct ParameterPlace {
  const ShardGroup* group = nullptr;
  const GroupParameter* parameter = nullptr;
};

// What all batches share.
struct UnitEnvironment {
  Context& context;
  const UpdatePlan& update;
  const UpdateOps& ops;
  const StateStore& state;
  std::vector<ParameterPlace> places;          // per parameter of the plan
  std::span<std::byte> workspace;              // of the operations
  std::map<std::string, int64_t> sent;         // bytes of fragments, by field
};

class UnitWork {
 public:
  // `batch` numbers the environment's batches, which outlive this.
  UnitWork(UnitEnvironment& environment, size_t batch);

  // Sends and asks for what the owners read, of the parameters that take part in this step.
  void start(std::byte* staging, const std::vector<bool>& takes_part);
  // Waits for it, runs the operation on the units owned here and sends the results.
  void compute(const StepContext& step);
  // Waits for the results of units owned elsewhere.
  void finish();

 private:
  struct Part {  // of a unit, for one of its fields
    const plan::OwnedUnit* unit;
    const plan::UnitField* field;
    plan::UnitRole role;
    const UnitPlace* place;
    std::byte* packed;  // or null
    std::byte* wire;    // or null
    Field local;        // this rank's part of the parameter's field
    int64_t local_begin;
  };

  Part part_of(int64_t unit, size_t field) const;
  template <class Visit>
  void each_part(Visit&& visit) const;
  // A fragment of a field as it lies at its holder.
  std::span<std::byte> local_run(const Part& p, Interval packed) const;
  void gather_local(const Part& p, Interval packed, std::byte* to, bool as_wire) const;
  void scatter_local(const Part& p, Interval packed, const std::byte* from, bool from_wire) const;
  void run_unit(int64_t unit, const StepContext& step);
  void round_in_place(const Part& p) const;
  void run(std::vector<comm::Send>& sends, std::vector<comm::Receive>& receives);

  UnitEnvironment& env_;
  const plan::UnitBatch& batch_;
  plan::BatchStaging staged_;
  std::byte* staging_ = nullptr;
  std::vector<bool> takes_part_;  // per unit of the batch
  comm::WorkHandle work_;
};

}  // namespace dovetail::engine_detail

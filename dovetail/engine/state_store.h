// Optimizer state of one rank: one allocation per group and field, views of it per parameter or unit.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "dovetail/engine/context.h"
#include "dovetail/engine/shard_group.h"
#include "dovetail/engine/update_plan.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail::engine_detail {

class StateStore {
 public:
  // Allocates everything and gives it its initial values. All arguments outlive the store.
  StateStore(Context& context, const std::vector<std::unique_ptr<ShardGroup>>& groups, const UpdatePlan& update);

  // This rank's part of a field of a parameter (weight and gradient included), as held at zero1.
  Field field(const ShardGroup& group, const GroupParameter& parameter, std::string_view name) const;
  // State per unit of an owned unit (index into the owner plan), in the operation's order; empty for others.
  const std::vector<Field>& unit_fields(int64_t unit) const { return unit_fields_[unit]; }

  // Appends weights and state of all parameters, each entry's first interval on every rank.
  void list(ShardedState& out) const;

 private:
  using Key = std::pair<std::string, DType>;  // of a field
  struct Range {
    const StateField* field = nullptr;
    Buffer* buffer = nullptr;
    int64_t offset = 0, values = 0;
  };

  void allocate(int64_t group, const std::vector<int64_t>& owned);
  // Appends an entry for each unit of the tensor owned here, after the field's own at the end of `out`.
  void list_units(int64_t group, int64_t tensor, const StateField& field, ShardedState& out) const;

  Context& context_;
  const std::vector<std::unique_ptr<ShardGroup>>& groups_;
  const UpdatePlan& update_;
  std::vector<std::map<Key, Buffer>> buffers_, unit_buffers_;  // per group
  std::vector<std::map<std::string, Range, std::less<>>> ranges_;  // per parameter
  std::vector<std::vector<Field>> unit_fields_;                // per unit of the owner plan
};

}  // namespace dovetail::engine_detail

// A rank's copy of what it writes to a checkpoint, taken while training waits.
#pragma once

#include <cstdint>
#include <vector>

#include "dovetail/checkpoint/manifest.h"
#include "dovetail/checkpoint/page_buffer.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail {

// What the state holds, in the order of first appearance: equal on all ranks. Throws ConfigError
// where two entries of one tensor and field differ in shape or dtype, or where an interval lies
// outside of its tensor.
std::vector<StoredEntry> schema_of(const ShardedState& state);

struct Snapshot {
  PageBuffer data;  // the data file's bytes
  std::vector<Record>
      records;  // of entries in schema order, one per non-empty writer entry of the state
  std::vector<NonFinite> non_finite;  // at most one per record; floating-point entries only
};

// One copy of the entries that this rank writes, at memory speed.
Snapshot take_snapshot(const ShardedState& state);

}  // namespace dovetail

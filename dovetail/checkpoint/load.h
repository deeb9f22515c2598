// Loading a checkpoint into sharded state: all or nothing, on all ranks.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "dovetail/checkpoint/folder.h"
#include "dovetail/checkpoint/reader.h"
#include "dovetail/checkpoint/reshard.h"
#include "dovetail/comm/group.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail {

struct LoadOptions {
  LoadFields fields = LoadFields::all;
  bool allow_non_finite = false;  // take a checkpoint that was marked as holding infinities or NaN
};

// Fills the state from the checkpoint, bit for bit, and returns its training state. Collective.
// Until every rank has read and verified all that it needs, nothing is written; if any fails, the
// same error is thrown on all and the state is what it was: FileError for damage, ConfigError for
// another model or optimizer. Needs staging memory as large as this rank's state; reads the chunks
// of 1 MiB that hold its elements.
TrainingState load_checkpoint(const std::string& path, const ShardedState& state,
                              const std::vector<TensorAlias>& aliases, comm::Group& world,
                              const LoadOptions& options = {});

struct LoadedCheckpoint {
  std::string path;
  TrainingState training;
  std::vector<std::string> passed_over;  // newer ones, newest first, with the reason
};

// Loads the newest checkpoint of the folder that is sound; damaged, unfinished and marked ones are
// passed over and reported. Nothing where the folder holds none at all; FileError with all reasons
// where none of them is sound. A model or optimizer that does not match is a ConfigError, not
// passed over. Collective; `folder` is read by rank 0.
std::optional<LoadedCheckpoint> load_newest(const std::string& folder, const ShardedState& state,
                                            const std::vector<TensorAlias>& aliases,
                                            comm::Group& world, const LoadOptions& options = {});

}  // namespace dovetail

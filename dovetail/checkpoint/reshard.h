// Which bytes of which files a rank needs, at any world size and degrees.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dovetail/checkpoint/reader.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail {

enum class LoadFields : uint8_t {
  all,
  weights,  // weights and buffers; optimizer state is left as it is
};

// Bytes of a file and where they go in staging memory.
struct ReadPiece {
  int64_t file = 0;
  Interval bytes;
  int64_t target = 0;
};

// Staging memory of one state entry.
struct StagedEntry {
  int64_t entry = 0;  // index into the state
  int64_t offset = 0;
  int64_t bytes = 0;
};

struct ReadPlan {
  std::vector<ReadPiece> pieces;    // by file and place
  std::vector<StagedEntry> staged;  // entries of which this rank holds elements
  int64_t staging_bytes = 0;        // as much as this rank's state
};

// Compares what is stored with what the state holds and throws a ConfigError that names the
// difference, the thing wanted and the thing got: a tensor or field that only one side has, another
// shape, another dtype. `aliases` are those of the model; a tensor that the checkpoint stores under
// one of its other names is found, and so is one that was tied then and is not now.
void check_matches(const Checkpoint& checkpoint, const ShardedState& state,
                   const std::vector<TensorAlias>& aliases, LoadFields fields);

// Only for a state that matches.
ReadPlan plan_reads(const Checkpoint& checkpoint, const ShardedState& state,
                    const std::vector<TensorAlias>& aliases, LoadFields fields);

// The chunks that the pieces lie in, ascending.
std::vector<ChunkRef> chunks_of(const Checkpoint& checkpoint, const std::vector<ReadPiece>& pieces);

// Reads the plan's pieces into staging memory (staging_bytes). Plan and memory outlive the reader.
ChunkReader make_reader(const Checkpoint& checkpoint, const ReadPlan& plan, std::byte* staging);

}  // namespace dovetail

// A run's checkpoints: written in the background while training goes on, found again by --resume.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/checkpoint/writer.h"
#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"

namespace dovetail::trainer {

// Where a run stands. With the weights and the optimizer's state it is all that going on needs:
// every random number is a function of (seed, step or index), so the seed is the random state.
struct Progress {
  int64_t step = 0;             // training steps done, skipped ones among them
  int64_t optimizer_steps = 0;  // updates made
  int64_t position = 0;         // in the order of samples
  int64_t tokens = 0;           // trained on
  // What `position` refers to; a resumed run must agree.
  int64_t seed = 0;
  int64_t sequence = 0;
  int64_t shuffle = 1;    // data.shuffle
  int64_t keep_last = 0;  // data.last_batch = "keep"
  uint64_t data_digest = 0;
  bool operator==(const Progress&) const = default;
};
nlohmann::json to_json(const Progress& progress);
Progress progress_from_json(const nlohmann::json& json);  // throws FileError naming the key

// Throws ConfigError unless a run that stands at `now` (step 0) can go on from `then`.
void check_resumable(const Progress& now, const Progress& then);

struct ResumedRun {
  std::string path;
  Progress progress;
  bool has_position = true;              // else the data begins anew
  std::vector<std::string> passed_over;  // newer checkpoints, with the reason
};

struct CheckpointOptions {
  std::string folder;
  int64_t keep = 2;
  std::string config;  // stored as it is
};

class RunCheckpoints {
 public:
  RunCheckpoints(Engine& engine, comm::Group& world, CheckpointOptions options);

  // Loads the newest sound checkpoint into the engine; nothing where there is none. One that another program has
  // written, which has no position in the data, goes on from `begin` with its count of steps. Collective, before the
  // first begin().
  std::optional<ResumedRun> resume(const Progress& begin);

  // Starts saving; one that is still being written is finished first. Collective.
  void begin(const Progress& progress);
  // Every step, on every rank: returns a checkpoint once when it has become complete.
  std::optional<SavedCheckpoint> poll();
  // Waits for what is being written.
  std::optional<SavedCheckpoint> finish();

 private:
  CheckpointWriter& writer();

  Engine& engine_;
  comm::Group& world_;
  const CheckpointOptions options_;
  std::optional<CheckpointWriter> writer_;  // made late: it removes what broken-off runs left
};

}  // namespace dovetail::trainer

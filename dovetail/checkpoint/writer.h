// Writing checkpoints while training goes on.
//
//   CheckpointWriter writer(world, {.folder = "runs/a/checkpoints"});
//   for (step ...) {
//     engine.step(...);
//     if (save_now) writer.begin(engine.state(), engine.aliases(), training);   // copies this
//     rank's share, returns writer.poll(); // every step, every rank
//   }
//   writer.finish();
//
// A checkpoint appears complete or not at all (docs/checkpoint-format.md). All calls but busy() and
// last() are collective, made by the thread that uses `world`. A fault on any rank is the same
// error on all of them, naming rank and file; what was complete stays, the unfinished folder is
// removed, and the writer can be used again.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/checkpoint/background.h"
#include "dovetail/checkpoint/file.h"
#include "dovetail/checkpoint/manifest.h"
#include "dovetail/checkpoint/snapshot.h"
#include "dovetail/checkpoint/vote.h"
#include "dovetail/comm/group.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail {

enum class NonFinitePolicy : uint8_t {
  refuse,  // begin() throws FileError naming tensor, field and element
  mark,    // saved, but passed over by load_newest
};

struct WriterOptions {
  std::string folder = {};  // seen by all ranks; made if needed
  int64_t keep = 2;         // complete checkpoints to keep; 0 keeps all
  int64_t vote_every = 10;  // poll() communicates at each vote_every-th call while busy
  NonFinitePolicy non_finite = NonFinitePolicy::refuse;
  std::shared_ptr<FileSystem> files = {};  // null: the disk
};

struct SavedCheckpoint {
  std::string path;
  int64_t step = 0;
  int64_t bytes = 0;            // of all data files
  double snapshot_seconds = 0;  // that this rank's begin() copied for
  double total_seconds = 0;     // from begin() to the vote that found it complete
  std::string cleanup_fault;    // why an older checkpoint could not be removed; usually empty
};

class CheckpointWriter {
 public:
  // Removes what broken-off runs left in the folder: list_checkpoints() before this says why they
  // are passed over.
  CheckpointWriter(comm::Group& world, WriterOptions options);
  // Gives up on a checkpoint that is not complete. Not collective.
  ~CheckpointWriter();

  // Starts a checkpoint of the state: step, state and training must be those of one moment on all
  // ranks. Cost: one copy of the bytes that this rank writes, held until they are written, and a
  // vote. The state may change once it returns. A checkpoint that is still being written is
  // finished first.
  void begin(const ShardedState& state, const std::vector<TensorAlias>& aliases,
             const TrainingState& training);

  // Looks, at every vote_every-th call, whether the checkpoint has become complete; returns it
  // once. Does not wait for the disk.
  std::optional<SavedCheckpoint> poll();
  // Waits until nothing is being written; returns the checkpoint that became complete.
  std::optional<SavedCheckpoint> finish();

  bool busy() const { return stage_ != Stage::idle; }  // equal on all ranks
  const std::optional<SavedCheckpoint>& last() const { return last_; }
  const std::vector<std::string>& leftovers_removed() const { return leftovers_; }  // rank 0's

 private:
  enum class Stage : uint8_t { idle, writing, committing };

  std::string prepare(const ShardedState& state, const std::vector<TensorAlias>& aliases,
                      const TrainingState& training);
  void agree(const std::vector<Ballot>& ballots);
  void start_writing();
  void start_commit(const std::vector<Ballot>& ballots);
  std::vector<std::string> collect_shares(const std::vector<Ballot>& ballots);
  // One vote; true when the checkpoint is complete.
  bool advance();
  Ballot ballot();
  [[noreturn]] void abandon(const std::vector<Ballot>& ballots);

  comm::Group& world_;
  const WriterOptions options_;
  std::shared_ptr<FileSystem> files_;
  std::vector<std::string> leftovers_;
  Stage stage_ = Stage::idle;
  int64_t polls_ = 0;
  Manifest manifest_;          // all but files
  Snapshot snapshot_;          // empty unless writing
  DataFile file_;              // written by the task while writing
  std::string share_;          // this rank's RankShare, when written
  std::string name_;           // of the checkpoint under way, equal on all ranks once agreed
  bool folder_made_ = false;   // rank 0
  std::string cleanup_fault_;  // rank 0, written by the task while committing
  double begun_ = 0, snapshot_seconds_ = 0;
  std::optional<SavedCheckpoint> last_;
  BackgroundTask task_;  // last: ends before what it uses
};

}  // namespace dovetail

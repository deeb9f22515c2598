// One rank's part of a training run: data, model, engine and the loop around them.
//
// A run's folder (shared by all ranks) holds config.toml, metrics.jsonl, checkpoints/, sample.txt
// and report.html. Rank 0 writes all but its own shard of the checkpoints, and alone speaks on
// standard output.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "dovetail/comm/group.h"
#include "dovetail/engine/engine.h"
#include "dovetail/engine/trace.h"
#include "dovetail/models/common/model.h"
#include "dovetail/trainer/config.h"
#include "dovetail/trainer/dataset.h"
#include "dovetail/trainer/run_checkpoints.h"
#include "dovetail/trainer/run_log.h"
#include "dovetail/trainer/sample_order.h"
#include "dovetail/trainer/stop_signal.h"
#include "dovetail/update/lr.h"

namespace dovetail::trainer {

class TrainingRun {
 public:
  // Collective. Throws on all ranks what any of them finds wrong: ConfigError, FileError.
  TrainingRun(Config config, std::shared_ptr<comm::Group> world);

  // Goes on from the newest sound checkpoint of the run's folder, if there is one, and says which
  // and why others were passed over; false where there is none. Collective, before train() or
  // evaluate().
  bool resume();
  // Trains to the last step or until a rank is told to stop (`stop` may be null: never); leaves
  // checkpoint, report and, at the end, a sample. Throws StateError for a loss that is not finite
  // unless the configuration says to skip the step. Collective.
  void train(const StopSignal* stop);
  // Records ten steps of the training to come, after two that are not: trace.json and trace.txt in the run's folder,
  // and a table in the log.
  void trace_steps();
  // Validation loss of the weights as they are. Collective.
  ValidationResult evaluate();
  bool is_text() const;  // tokens are bytes

  const Progress& progress() const { return progress_; }
  Engine& engine() { return *engine_; }
  comm::Group& world() { return *world_; }

 private:
  StepReport train_one_step(const StopSignal* stop);
  [[noreturn]] void refuse(const StepReport& report);
  void validate_now();
  void begin_checkpoint();
  LastBatch last_batch() const;
  void note(const std::optional<SavedCheckpoint>& saved);
  std::string generate_sample();
  void write_report(const std::string& sample);
  StepReport train_traced_step(const StopSignal* stop);
  void finish_trace();  // after the last step that is recorded
  bool leads() const { return world_->rank() == 0; }

  const Config config_;
  const std::string folder_;
  std::string optimizer_table_;  // rank 0: which parameter uses which optimizer
  std::shared_ptr<comm::Group> world_;
  std::unique_ptr<models::Model> model_;
  std::optional<Split> data_;
  std::optional<SampleOrder> order_;
  RankShare share_;
  LrSchedule schedule_;
  std::unique_ptr<Engine> engine_;
  std::optional<RunCheckpoints> checkpoints_;
  std::unique_ptr<RunLog> log_;  // rank 0's, while training
  Progress progress_;
  int64_t saved_step_ = -1;
  std::optional<ValidationResult> last_validation_;
  double training_seconds_ = 0;
  std::shared_ptr<Trace> trace_;
  std::optional<int64_t> traced_;  // steps in it; negative: before it; empty: none is wanted
};

}  // namespace dovetail::trainer

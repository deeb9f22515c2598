// What a run says: lines on the terminal and metrics.jsonl. Rank 0 has one; the others stay silent.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "dovetail/checkpoint/writer.h"
#include "dovetail/trainer/metrics.h"
#include "dovetail/trainer/validation.h"
#include "dovetail/trainer/weighted_step.h"

namespace dovetail::trainer {

struct StepFacts {
  int64_t step = 0;  // 1 for the first
  int64_t position = 0;
  float lr = 0;
  double seconds = 0;
  int64_t bytes_sent = 0, bytes_received = 0, bytes_held = 0;
};

class RunLog {
 public:
  // `steps_done` and `total_steps` for progress and the time left; lines of later steps are dropped
  // from the file.
  RunLog(const std::string& metrics_path, int64_t steps_done, int64_t total_steps,
         int64_t log_every);

  void step(const StepFacts& facts, const StepReport& report);
  void validation(int64_t step, const ValidationResult& result, bool text);
  void checkpoint(int64_t step, const SavedCheckpoint& saved);

 private:
  std::string position_text(int64_t step) const;

  MetricsFile metrics_;
  const int64_t total_steps_, log_every_;
  double seconds_ = 0, window_seconds_ = 0;
  int64_t steps_ = 0, window_tokens_ = 0;
};

// One line on standard output, at once.
void say(const std::string& line);

}  // namespace dovetail::trainer

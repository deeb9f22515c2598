// RUN/metrics.jsonl: one JSON object a line, written by rank 0, flushed line by line.
//
// A step's line has step (1 for the first), loss (nats per token), lr, grad_norm, clip, tokens,
// tokens_per_second, step_ms, bytes_sent, bytes_received, bytes_held, position; and skipped where
// the step changed nothing. Validation lines have step, val_loss (nats per token), val_tokens and,
// for text, val_bpb. Checkpoint lines have step, checkpoint, bytes, snapshot_ms, seconds. What is
// not finite is null.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace dovetail::trainer {

class MetricsFile {
 public:
  // Keeps the lines of steps up to `steps_done` that an earlier part of the run wrote (0: none), so
  // that a resumed run leaves the file of one that never stopped. Throws FileError.
  MetricsFile(std::string path, int64_t steps_done);

  void write(const nlohmann::json& line);

 private:
  std::string path_;
  std::ofstream out_;
};

// All lines of a metrics file that parse; the last one may be cut short.
std::vector<nlohmann::json> read_metrics(const std::string& path);

}  // namespace dovetail::trainer

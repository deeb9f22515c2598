// A small job for tests: a tiny Llama on a few kilobytes of text, with ranks as threads.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/comm/threads/spawn.h"
#include "dovetail/trainer/config.h"
#include "dovetail/trainer/metrics.h"
#include "dovetail/trainer/run_setup.h"
#include "dovetail/trainer/training_run.h"
#include "tests/trainer/temporary.h"

namespace dovetail::trainer {

inline constexpr const char* kTinyModel =
    "name = \"llama\"\nhidden_size = 32\nintermediate_size = 64\nnum_hidden_layers = "
    "2\nnum_attention_heads = 4\n"
    "max_position_embeddings = 64\n";

// Text that a small model can learn something from.
inline std::string tiny_text(size_t size) {
  std::string text;
  for (int i = 0; text.size() < size; ++i)
    text += "line " + std::to_string(i * 7919 % 997) +
            (i % 3 ? ": the sum is " : ": the product is ") + std::to_string(i) + "\n";
  return text.substr(0, size);
}

// The text of a configuration for a run in `folder` on `data`.
inline std::string tiny_config(const std::string& folder, const std::string& data) {
  return "[run]\nname = \"tiny\"\nfolder = \"" + folder + "\"\n[model]\n" + kTinyModel +
         "[data]\nsources = [\"" + data +
         "\"]\nsequence = 16\nvalidation_fraction = 0.1\n[train]\nsteps = 6\nbatch = "
         "4\nmicro_batch = 1\nlog_every = 1\n"
         "validate_every = 0\nvalidation_samples = 12\n[optimizer]\nlr = 1e-2\nwarmup_steps = 2\n"
         "[checkpoint]\nevery = 3\nkeep = 8\n[sample]\ntokens = 8\n[comm]\ndeadline_seconds = 20\n";
}

// Runs `body` for every rank of a job; `resume` as on the command line.
inline void run_job(int ranks, const Config& config, bool resume,
                    const std::function<void(TrainingRun&)>& body) {
  prepare_folder(config.run_folder(), resume);
  comm::spawn(ranks, [&](comm::Group& group) {
    TrainingRun run(config, std::shared_ptr<comm::Group>(&group, [](comm::Group*) {}));
    if (resume) run.resume();
    body(run);
  });
}

inline void train_job(int ranks, const Config& config, bool resume = false) {
  run_job(ranks, config, resume, [](TrainingRun& run) { run.train(nullptr); });
}

// The metrics of steps (lines with "loss"), in order.
inline std::vector<nlohmann::json> step_lines(const std::string& folder) {
  std::vector<nlohmann::json> steps;
  for (auto& line : read_metrics(folder + "/metrics.jsonl"))
    if (line.contains("loss")) steps.push_back(std::move(line));
  return steps;
}

}  // namespace dovetail::trainer

// A training run's configuration: a TOML file, read into plain structs. Every key is listed here
// with its default; unknown keys, wrong types and impossible values are a ConfigError that names
// the key's path, what was wanted and what was got.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/update/rules.h"

namespace dovetail::trainer {

struct RunConfig {
  std::string name = "run";
  std::string folder;   // empty: runs/NAME
  int64_t seed = 1;     // initial weights, sample order, generated text
  int64_t ranks = 1;    // local ranks to start where no launcher and no --nproc says otherwise
  int64_t threads = 0;  // per rank, inside operations; 0: this host's cores shared among its ranks
  bool tensor_heap = true;  // CPU tensors keep their pages from one step to the next (storage/tensor_heap.h)
};

struct DataConfig {
  std::vector<std::string> sources;   // see sources.h
  std::vector<std::string> suffixes;  // of files taken from folders; none: all
  std::vector<std::string>
      validation;  // sources; none: the last validation_fraction of the training data
  double validation_fraction = 0.02;
  int64_t sequence = 256;  // tokens per sample
  bool shuffle = true;
  std::string last_batch = "drop";  // "drop" or "keep" what does not fill a batch at an epoch's end
};

struct TrainConfig {
  int64_t steps = 1000;
  int64_t batch = 16;       // samples per step, over all ranks
  int64_t micro_batch = 0;  // samples per rank and forward pass; 0: all of a rank's share
  double clip = 1.0;        // global gradient norm; 0: measure only
  std::string non_finite =
      "stop";  // a loss or norm that is not finite: "stop" with an error, or "skip" the step
  int64_t log_every = 10;            // steps between progress lines
  int64_t validate_every = 200;      // steps; 0: only at the end
  int64_t validation_samples = 256;  // 0: all
};

struct OptimizerConfig {
  std::string name = "adamw";       // or "adam8", "sgd", "muon", "shampoo"; the latter two leave vectors and
                                    // embeddings to adamw
  double lr = 1e-3;                 // peak
  std::string schedule = "cosine";  // "constant", "cosine", "linear", "wsd"
  int64_t warmup_steps = 0;
  double lr_floor = 0;                           // at the last step
  int64_t decay_steps = 0;                       // wsd
  std::string tail = "linear";                   // wsd
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // adamw, adam8
  double momentum = 0, dampening = 0;            // sgd
  bool nesterov = false;                         // sgd
  double weight_decay = 0.1;
  bool decay_vectors = false;
  std::vector<ParameterRule> rules;  // [[optimizer.rules]] pattern, lr_scale, weight_decay, optimizer
};

// See update/muon.h.
struct MuonConfig {
  double momentum = 0.95;
  bool nesterov = true;
  int64_t steps = 5;
  std::string scale = "match_rms_adamw";  // or "original"
  std::string unit = "matrix";            // or "head", or the name of other nodes
};

// See update/shampoo.h.
struct ShampooConfig {
  double beta1 = 0.9, beta2 = 0.99;
  double epsilon = 1e-6;
  int64_t block = 1024;
  int64_t every = 10;             // steps between roots
  std::string grafting = "rmsprop";  // or "none", "sgd"
};

struct ShardConfig {
  int64_t zero1 = 0, zero2 = 0, zero3 = 0;  // 0: all ranks
  std::string block = "element";
  std::string boundary = "block";  // of shards: "unit": pad so that no unit of the update is cut; or "any"
  std::string format = "fp32";  // runtime parameters and gradients of kernels: "fp32", "bf16"
  std::string main = "fp32";    // main weights; nothing else yet
  int64_t alignment = 64, segments = 1;
  bool reshard_after_forward = true;
  int64_t prefetch = 1;
  int64_t pending_reductions = -1;  // -1: as suits the transport (plan::PlanOptions)
  bool local_accumulation = false;
  bool recompute = false;
};

struct CommConfig {
  // "auto": ranks of a host read one another's memory where they can, c10d (Gloo) carries the rest; "peer": the same,
  // or an error; "c10d"; "gloo_native": Gloo's own collectives, for comparison
  std::string backend = "auto";
  int64_t ranks_per_host = 0;  // ranks 0..n-1 count as one host, and so on; 0: as the machines are
  std::string
      interface;  // network interface; empty: loopback where the store is on it, else by host name
  double deadline_seconds = 60;
  double connect_seconds = 60;  // for all ranks to come together at the start
};

struct CheckpointConfig {
  int64_t every = 200;  // steps; 0: only at the end
  int64_t keep = 2;     // the last so many are kept
};

struct SampleConfig {
  std::string prompt = "def ";
  int64_t tokens = 400;      // 0: none
  double temperature = 0.8;  // 0: the likeliest token
  int64_t top_k = 40;        // 0: all
};

struct Config {
  RunConfig run;
  nlohmann::json model = nlohmann::json::object();  // [model]: name (default "llama") and its own
                                                    // keys, checked by the model
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  MuonConfig muon;
  ShampooConfig shampoo;
  ShardConfig shard;
  CommConfig comm;
  CheckpointConfig checkpoint;
  SampleConfig sample;

  std::string run_folder() const { return run.folder.empty() ? "runs/" + run.name : run.folder; }
};

// `overrides`: "key.path=value", value in TOML or a bare string; applied in order over the text.
Config parse_config(std::string_view text, const std::string& file_name,
                    const std::vector<std::string>& overrides);
Config load_config(const std::string& path, const std::vector<std::string>& overrides);

// Every key with its value; parses back to an equal configuration.
std::string to_toml(const Config& config);

// The known word nearest to a misspelt one; empty when none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

}  // namespace dovetail::trainer

#include "dovetail/trainer/run_setup.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <new>

#include "dovetail/base/dtype.h"
#include "dovetail/base/error.h"
#include "dovetail/models/registry.h"
#include "dovetail/trainer/sources.h"

namespace dovetail::trainer {

namespace fs = std::filesystem;

Split load_data(const DataConfig& config) {
  auto stream = std::make_shared<TokenStream>(find_documents(config.sources, config.suffixes));
  if (config.validation.empty())
    return split_dataset(std::move(stream), config.validation_fraction, config.sequence);
  auto validation =
      std::make_shared<TokenStream>(find_documents(config.validation, config.suffixes, "data.validation"));
  if (validation->vocab_size() != stream->vocab_size() ||
      validation->is_text() != stream->is_text())
    raise<ConfigError>(
        "data.validation: wanted {} with a vocabulary of {} as data.sources, got {} with {}",
        stream->is_text() ? "text" : "tokens", stream->vocab_size(),
        validation->is_text() ? "text" : "tokens", validation->vocab_size());
  Split split = split_dataset(std::move(stream), 0, config.sequence);
  split.validation = split_dataset(std::move(validation), 0, config.sequence, "data.validation").train;
  return split;
}

RankShare share_of(const TrainConfig& config, int64_t rank, int64_t ranks) {
  if (config.batch % ranks != 0)
    raise<ConfigError>("train.batch: wanted a multiple of the {} ranks, got {}", ranks,
                       config.batch);
  const int64_t per_rank = config.batch / ranks;
  const int64_t samples = config.micro_batch == 0 ? per_rank : config.micro_batch;
  if (per_rank % samples != 0)
    raise<ConfigError>("train.micro_batch: wanted a divisor of the {} samples of a rank, got {}",
                       per_rank, samples);
  return {rank, ranks, per_rank / samples, samples};
}

std::unique_ptr<models::Model> make_model(const Config& config, int64_t data_vocab) {
  nlohmann::json options = config.model;
  const std::string name = options.value("name", "llama");
  options.erase("name");
  if (!options.contains("vocab_size")) options["vocab_size"] = data_vocab;
  std::unique_ptr<models::Model> model;
  try {
    model = models::build_model(name, options);
  } catch (const ConfigError& e) {
    raise<ConfigError>("config: model: {}", e.what());
  } catch (const std::bad_alloc&) {
    raise<ConfigError>("config: model: wanted one that fits into memory, got {}", options.dump());
  } catch (const c10::Error& e) {
    raise<ConfigError>("config: model: cannot be made from {}: {}", options.dump(), e.what_without_backtrace());
  }
  if (model->vocabulary() < data_vocab)
    raise<ConfigError>("model.vocab_size: wanted at least the data's {}, got {}", data_vocab,
                       model->vocabulary());
  if (model->context() < config.data.sequence)
    raise<ConfigError>("data.sequence: wanted at most the model's context of {}, got {}",
                       model->context(), config.data.sequence);
  model->reset_parameters(static_cast<uint64_t>(config.run.seed));
  return model;
}

LrSchedule schedule_of(const OptimizerConfig& config, int64_t steps) {
  LrSchedule schedule;
  schedule.kind = parse_lr_kind(config.schedule);
  schedule.peak = config.lr;
  schedule.warmup_steps = config.warmup_steps;
  if (schedule.kind != LrKind::constant) {
    schedule.floor = config.lr_floor;
    schedule.total_steps = steps;
  }
  if (schedule.kind == LrKind::wsd) {
    schedule.decay_steps = config.decay_steps;
    schedule.tail = parse_lr_tail(config.tail);
  }
  validate(schedule);
  return schedule;
}

OptimizerOptions optimizer_options(const Config& all) {
  const OptimizerConfig& config = all.optimizer;
  OptimizerOptions options;
  options.name = config.name;
  options.adamw = {config.beta1, config.beta2, config.eps};
  options.sgd.momentum = config.momentum;
  options.sgd.dampening = config.dampening;
  options.sgd.nesterov = config.nesterov;
  options.muon.momentum = all.muon.momentum;
  options.muon.nesterov = all.muon.nesterov;
  options.muon.iteration.steps = static_cast<int>(all.muon.steps);
  options.muon.scale = parse_muon_scale(all.muon.scale);
  options.muon.unit = all.muon.unit;
  options.shampoo.beta1 = all.shampoo.beta1;
  options.shampoo.beta2 = all.shampoo.beta2;
  options.shampoo.epsilon = all.shampoo.epsilon;
  options.shampoo.block = all.shampoo.block;
  options.shampoo.every = all.shampoo.every;
  options.shampoo.grafting = parse_grafting(all.shampoo.grafting);
  options.rules = {config.weight_decay, config.decay_vectors, config.rules};
  return options;
}

plan::PlanOptions plan_options(const ShardConfig& config, int64_t ranks) {
  auto degree = [&](int64_t asked) { return asked == 0 ? ranks : asked; };
  plan::PlanOptions options;
  options.world = ranks;
  options.degrees = {degree(config.zero1), degree(config.zero2), degree(config.zero3)};
  options.main = parse_dtype(config.main);
  options.format = config.format;
  options.block = parse_block_kind(config.block);
  options.boundary = plan::parse_boundary(config.boundary);
  options.alignment = config.alignment;
  options.segments = static_cast<int>(config.segments);
  options.reshard_after_forward = config.reshard_after_forward;
  options.prefetch = static_cast<int>(config.prefetch);
  options.pending_reductions = static_cast<int>(config.pending_reductions);
  options.local_accumulation = config.local_accumulation;
  return options;
}

EngineOptions engine_options(const Config& config, const models::Model& model, int64_t ranks) {
  EngineOptions options;
  options.plan = plan_options(config.shard, ranks);
  options.norm.max_norm =
      config.train.clip > 0 ? config.train.clip : std::numeric_limits<double>::infinity();
  options.recompute = config.shard.recompute;
  options.seed = static_cast<uint64_t>(config.run.seed);
  options.hints = model.specs();
  return options;
}

void agree(comm::Group& world, uint64_t digest, std::string_view what) {
  const auto all = world.gather_bytes(std::as_bytes(std::span(&digest, 1)), {.label = what});
  uint64_t first = 0;
  std::memcpy(&first, all[0].data(), sizeof first);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    uint64_t other = 0;
    std::memcpy(&other, all[rank].data(), sizeof other);
    if (other != first)
      raise<ConfigError>("{}: rank {} has another than rank 0 (digest {:016x} against {:016x})",
                         what, rank, other, first);
  }
}

std::string prepare_folder(const std::string& folder, bool resume) {
  std::string kept;
  std::error_code error;
  if (!resume && fs::exists(fs::path(folder) / "config.toml")) {
    for (int n = 1; kept.empty() || fs::exists(kept); ++n) kept = folder + "." + std::to_string(n);
    fs::rename(folder, kept, error);
    if (error)
      raise<FileError>("{}: cannot keep the earlier run as {}: {}", folder, kept, error.message());
  }
  fs::create_directories(folder, error);
  if (error) raise<FileError>("{}: cannot create the run's folder: {}", folder, error.message());
  return kept;
}

}  // namespace dovetail::trainer

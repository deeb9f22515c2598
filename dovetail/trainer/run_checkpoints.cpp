#include "dovetail/trainer/run_checkpoints.h"

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/load.h"

namespace dovetail::trainer {
namespace {

// f(key, member) for every member of a Progress.
template <class P, class F>
void members(P& p, F&& f) {
  f("step", p.step);
  f("optimizer_steps", p.optimizer_steps);
  f("position", p.position);
  f("tokens", p.tokens);
  f("seed", p.seed);
  f("sequence", p.sequence);
  f("shuffle", p.shuffle);
  f("keep_last", p.keep_last);
  f("data_digest", p.data_digest);
}

}  // namespace

nlohmann::json to_json(const Progress& progress) {
  auto json = nlohmann::json::object();
  members(progress, [&](const char* key, auto value) { json[key] = value; });
  return json;
}

Progress progress_from_json(const nlohmann::json& json) {
  Progress progress;
  members(progress, [&](const char* key, auto& value) {
    const auto it = json.find(key);
    if (it == json.end() || !it->is_number_integer())
      raise<FileError>("checkpoint: trainer.{}: wanted an integer, got {}", key,
                       it == json.end() ? "nothing" : it->dump());
    value = it->get<std::decay_t<decltype(value)>>();
  });
  return progress;
}

void check_resumable(const Progress& now, const Progress& then) {
  auto check = [](const char* what, auto mine, auto stored) {
    if (mine != stored)
      raise<ConfigError>(
          "resume: {}: the checkpoint has {}, this run {}: its position in the data means nothing "
          "here",
          what, stored, mine);
  };
  check("run.seed", now.seed, then.seed);
  check("data.sequence", now.sequence, then.sequence);
  check("data.shuffle", now.shuffle, then.shuffle);
  check("data.last_batch = keep", now.keep_last, then.keep_last);
  check("digest of the data", now.data_digest, then.data_digest);
}

RunCheckpoints::RunCheckpoints(Engine& engine, comm::Group& world, CheckpointOptions options)
    : engine_(engine), world_(world), options_(std::move(options)) {}

std::optional<ResumedRun> RunCheckpoints::resume(const Progress& begin) {
  DT_CHECK(!writer_, "resume() after begin()");
  auto loaded = load_newest(options_.folder, engine_.state(), engine_.aliases(), world_);
  if (!loaded) return std::nullopt;
  ResumedRun run{.path = loaded->path, .progress = begin, .passed_over = loaded->passed_over};
  const auto json = nlohmann::json::parse(loaded->training.trainer);
  run.has_position = json.contains("position");
  if (run.has_position)
    run.progress = progress_from_json(json);
  else
    run.progress.step = run.progress.optimizer_steps = loaded->training.step;
  engine_.state_was_loaded();
  engine_.set_steps_done(run.progress.optimizer_steps);
  return run;
}

void RunCheckpoints::begin(const Progress& progress) {
  TrainingState training;
  training.optimizer = engine_.describe_optimizer();
  training.step = progress.step;
  training.degrees = plan::to_text(engine_.plan().options.degrees);
  training.plan_hash = plan::hash_of(engine_.plan());
  training.config = options_.config;
  training.trainer = to_json(progress).dump();
  writer().begin(engine_.state(), engine_.aliases(), training);
}

std::optional<SavedCheckpoint> RunCheckpoints::poll() {
  return writer_ ? writer_->poll() : std::nullopt;
}

std::optional<SavedCheckpoint> RunCheckpoints::finish() {
  return writer_ ? writer_->finish() : std::nullopt;
}

CheckpointWriter& RunCheckpoints::writer() {
  if (!writer_)
    writer_.emplace(
        world_, WriterOptions{.folder = options_.folder, .keep = options_.keep, .files = nullptr});
  return *writer_;
}

}  // namespace dovetail::trainer

#include "dovetail/checkpoint/writer.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/checkpoint/commit.h"
#include "dovetail/checkpoint/folder.h"

namespace dovetail {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Every word that ranks must agree on, a line per thing.
std::string terms_of(const Manifest& m) {
  const TrainingState& t = m.training;
  const auto quote = [](const std::string& words) { return nlohmann::json(words).dump(); };
  std::string text =
      fmt::format("step {}\ndegrees {}\nplan {:016x}\noptimizer {}\nconfig {}\ntrainer {}\n",
                  t.step, t.degrees, t.plan_hash, quote(t.optimizer), quote(t.config), t.trainer);
  for (const StoredEntry& e : m.entries)
    text += fmt::format("{} {} [{}]\n", e.name(), name_of(e.dtype), fmt::join(e.shape, ", "));
  for (const TensorAlias& a : m.aliases) text += fmt::format("alias {} of {}\n", a.alias, a.tensor);
  return text;
}

// The first lines in which two texts differ.
std::string first_difference(std::string_view a, std::string_view b) {
  const auto line = [](std::string_view& text) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view head = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return head;
  };
  while (!a.empty() || !b.empty()) {
    const std::string_view left = line(a), right = line(b);
    if (left != right) return fmt::format("\"{}\" against \"{}\"", left, right);
  }
  return "nothing";
}

void write_data(FileSystem& files, const std::string& folder, const Snapshot& snapshot,
                DataFile& file, const std::atomic<bool>& cancelled) {
  if (file.name.empty()) return;
  const auto output = files.create(folder + "/" + file.name);
  for (int64_t at = 0; at < snapshot.data.size(); at += kChunkBytes) {
    if (cancelled) raise<FileError>("{}/{}: writing was given up", folder, file.name);
    const auto chunk =
        snapshot.data.span().subspan(at, std::min(kChunkBytes, snapshot.data.size() - at));
    file.checksums.push_back(hash64(chunk));
    output->write(chunk);
  }
  output->finish();
  files.sync_folder(folder);
}

void refuse_non_finite(const Manifest& manifest, const Snapshot& snapshot) {
  if (snapshot.non_finite.empty()) return;
  const NonFinite& first = snapshot.non_finite.front();
  raise<FileError>(
      "{}: element {} is not finite{}; not saved", manifest.entries[first.entry].name(),
      first.element,
      snapshot.non_finite.size() > 1
          ? fmt::format(" (nor are elements of {} other runs)", snapshot.non_finite.size() - 1)
          : "");
}

void check(const WriterOptions& options) {
  if (options.folder.empty()) raise<ConfigError>("checkpoint folder: no name given");
  if (options.keep < 0)
    raise<ConfigError>("checkpoints to keep: wanted 0 or more, got {}", options.keep);
  if (options.vote_every < 1)
    raise<ConfigError>("vote_every: wanted 1 or more, got {}", options.vote_every);
}

}  // namespace

CheckpointWriter::CheckpointWriter(comm::Group& world, WriterOptions options)
    : world_(world),
      options_(std::move(options)),
      files_(options_.files ? options_.files : make_disk()) {
  task_.start([this](const std::atomic<bool>&) {
    check(options_);
    if (world_.rank() != 0) return;
    files_->create_folder(options_.folder);
    leftovers_ = remove_leftovers(*files_, options_.folder);
  });
  throw_if_failed(vote_when_ended(world_, task_, 0, "checkpoint folder"), world_,
                  "checkpoint folder");
}

CheckpointWriter::~CheckpointWriter() = default;

std::string CheckpointWriter::prepare(const ShardedState& state,
                                      const std::vector<TensorAlias>& aliases,
                                      const TrainingState& training) {
  check_json_object(training.trainer, "training state");
  manifest_ = {.training = training,
               .world = world_.size(),
               .chunk_bytes = kChunkBytes,
               .entries = schema_of(state),
               .aliases = aliases,
               .files = {},
               .non_finite = {}};
  snapshot_ = take_snapshot(state);
  snapshot_seconds_ = now() - begun_;
  if (options_.non_finite == NonFinitePolicy::refuse) refuse_non_finite(manifest_, snapshot_);
  nlohmann::json text{{"terms", hash64(terms_of(manifest_))}};
  if (world_.rank() == 0) {
    name_ = to_text(free_name(options_.folder, training.step));
    files_->create_folder(writing_path(options_.folder, name_));
    folder_made_ =
        true;  // synced with the rename; waiting for the disk here would hold up training
    text["name"] = name_;
  }
  return text.dump();
}

void CheckpointWriter::begin(const ShardedState& state, const std::vector<TensorAlias>& aliases,
                             const TrainingState& training) {
  finish();
  begun_ = now();
  const Ballot mine = attempt([&] { return prepare(state, aliases, training); });
  const auto ballots = vote(world_, mine, training.step, "begin checkpoint");
  if (any_failed(ballots)) abandon(ballots);
  agree(ballots);
  start_writing();
}

// All ranks see the same hashes, so all go the same way.
void CheckpointWriter::agree(const std::vector<Ballot>& ballots) {
  std::vector<uint64_t> terms;
  for (const Ballot& b : ballots) terms.push_back(nlohmann::json::parse(b.text).at("terms"));
  if (std::ranges::adjacent_find(terms, std::ranges::not_equal_to{}) != terms.end()) {
    const auto texts = vote(world_, {Ballot::Says::done, terms_of(manifest_)},
                            manifest_.training.step, "checkpoint terms");
    const Ballot mine = attempt([&]() -> std::string {
      for (size_t i = 1; i < texts.size(); ++i)
        if (texts[i].text != texts[0].text)
          raise<ConfigError>("ranks {} and {} do not save the same thing: {}",
                             world_.global_ranks()[0], world_.global_ranks()[i],
                             first_difference(texts[0].text, texts[i].text));
      return {};
    });
    abandon(std::vector<Ballot>(world_.size(), mine));
  }
  name_ = nlohmann::json::parse(ballots[0].text).at("name");
}

void CheckpointWriter::start_writing() {
  file_ = {.name = snapshot_.data.size() > 0 ? fmt::format("rank-{:05}.bin", world_.rank()) : "",
           .bytes = snapshot_.data.size(),
           .checksums = {},
           .records = snapshot_.records};
  stage_ = Stage::writing;
  polls_ = 0;
  task_.start(
      [this, folder = writing_path(options_.folder, name_)](const std::atomic<bool>& cancelled) {
        write_data(*files_, folder, snapshot_, file_, cancelled);
      });
}

Ballot CheckpointWriter::ballot() {
  if (task_.running()) return {Ballot::Says::running, ""};
  if (task_.error()) return fault_ballot(task_.error());
  nlohmann::json text;
  if (stage_ == Stage::writing) {
    if (share_.empty()) {
      share_ = to_text(RankShare{.file = file_, .non_finite = snapshot_.non_finite});
      snapshot_ = {};
    }
    text = {{"bytes", file_.bytes}, {"share", share_.size()}};
  } else {
    text = {{"bytes", file_.bytes}, {"cleanup", cleanup_fault_}};
  }
  return {Ballot::Says::done, text.dump()};
}

bool CheckpointWriter::advance() {
  const auto ballots =
      vote(world_, ballot(), manifest_.training.step,
           stage_ == Stage::writing ? "checkpoint written" : "checkpoint complete");
  if (any_failed(ballots)) abandon(ballots);
  if (any_running(ballots)) return false;
  if (stage_ == Stage::writing) {
    start_commit(ballots);
    return false;
  }
  SavedCheckpoint saved{.path = options_.folder + "/" + name_,
                        .step = manifest_.training.step,
                        .bytes = 0,
                        .snapshot_seconds = snapshot_seconds_,
                        .total_seconds = now() - begun_,
                        .cleanup_fault = {}};
  for (const Ballot& b : ballots) {
    const auto text = nlohmann::json::parse(b.text);
    saved.bytes += text.at("bytes").get<int64_t>();
    if (saved.cleanup_fault.empty()) saved.cleanup_fault = text.at("cleanup");
  }
  last_ = std::move(saved);
  stage_ = Stage::idle;
  folder_made_ = false;
  share_.clear();
  return true;
}

std::vector<std::string> CheckpointWriter::collect_shares(const std::vector<Ballot>& ballots) {
  std::vector<std::string> shares;
  std::vector<comm::Send> sends;
  std::vector<comm::Receive> receives;
  if (world_.rank() == 0) {
    for (const Ballot& b : ballots)
      shares.emplace_back(nlohmann::json::parse(b.text).at("share").get<size_t>(), '\0');
    shares[0] = share_;
    for (int r = 1; r < world_.size(); ++r)
      receives.push_back({r, std::as_writable_bytes(std::span(shares[r]))});
  } else {
    sends.push_back({0, std::as_bytes(std::span(share_))});
  }
  world_
      .exchange(sends, receives,
                {.phase = comm::Phase::state,
                 .unit = -1,
                 .step = manifest_.training.step,
                 .label = "checkpoint records"})
      ->wait();
  return shares;
}

void CheckpointWriter::start_commit(const std::vector<Ballot>& ballots) {
  CommitRequest request{.folder = options_.folder,
                        .name = name_,
                        .manifest = manifest_,
                        .shares = collect_shares(ballots),
                        .keep = options_.keep};
  stage_ = Stage::committing;
  cleanup_fault_.clear();
  if (world_.rank() == 0)
    task_.start([this, request = std::move(request)](const std::atomic<bool>&) mutable {
      cleanup_fault_ = commit(*files_, std::move(request));
    });
}

void CheckpointWriter::abandon(const std::vector<Ballot>& ballots) {
  const int64_t step = manifest_.training.step;
  task_.ask_to_stop();
  vote_when_ended(world_, task_, step, "checkpoint given up");
  stage_ = Stage::idle;
  snapshot_ = {};
  share_.clear();
  // All have stopped writing: the folder can go.
  task_.start([this, remove = std::exchange(folder_made_, false)](const std::atomic<bool>&) {
    if (remove) files_->remove_folder(writing_path(options_.folder, name_));
  });
  std::string more;
  for (const Ballot& b : vote_when_ended(world_, task_, step, "checkpoint folder removed"))
    if (b.failed()) more = "; its folder is left: " + b.text;
  throw_if_failed(ballots, world_,
                  fmt::format("checkpoint of step {} was not written, earlier ones are untouched{}",
                              step, more));
  raise<InvariantError>("a checkpoint was abandoned without a fault");
}

std::optional<SavedCheckpoint> CheckpointWriter::poll() {
  if (!busy() || ++polls_ % options_.vote_every != 0 || !advance()) return std::nullopt;
  return last_;
}

std::optional<SavedCheckpoint> CheckpointWriter::finish() {
  if (!busy()) return std::nullopt;
  do {
    task_.wait_for(work_slice(world_));
  } while (!advance());
  return last_;
}

}  // namespace dovetail

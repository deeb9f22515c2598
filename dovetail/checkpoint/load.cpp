#include "dovetail/checkpoint/load.h"

#include <fmt/ranges.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/page_buffer.h"
#include "dovetail/checkpoint/snapshot.h"
#include "dovetail/checkpoint/vote.h"

namespace dovetail {
namespace {

constexpr std::string_view kRefused = "checkpoint refused";

void check_loadable(const Checkpoint& checkpoint, const ShardedState& state,
                    const std::vector<TensorAlias>& aliases, const LoadOptions& options) {
  schema_of(state);
  if (!options.allow_non_finite && !checkpoint.manifest().non_finite.empty())
    throw FileError(checkpoint.non_finite_text());
  check_matches(checkpoint, state, aliases, options.fields);
}

struct Candidate {
  std::string path, fault;
};

// Rank 0's view of the folder, on all ranks.
std::vector<Candidate> shared_list(const std::string& folder, comm::Group& world,
                                   const LoadOptions& options) {
  const Ballot mine = attempt([&] {
    nlohmann::json list = nlohmann::json::array();
    if (world.rank() == 0)
      for (const ListedCheckpoint& c : list_checkpoints(folder))
        list.push_back({c.path, !c.broken && options.allow_non_finite ? "" : c.fault});
    return list.dump();
  });
  const auto ballots = vote(world, mine, 0, "list checkpoints");
  throw_if_failed(ballots, world, "no checkpoint");
  std::vector<Candidate> list;
  for (const auto& c : nlohmann::json::parse(ballots[0].text)) list.push_back({c.at(0), c.at(1)});
  return list;
}

}  // namespace

TrainingState load_checkpoint(const std::string& path, const ShardedState& state,
                              const std::vector<TensorAlias>& aliases, comm::Group& world,
                              const LoadOptions& options) {
  const Checkpoint checkpoint = open_checkpoint(path, world);
  const Manifest& manifest = checkpoint.manifest();
  ReadPlan plan;
  PageBuffer staging;
  const Ballot mine = attempt([&] {
    check_loadable(checkpoint, state, aliases, options);
    plan = plan_reads(checkpoint, state, aliases, options.fields);
    staging = PageBuffer(plan.staging_bytes);
    return std::string();
  });
  throw_if_failed(vote(world, mine, manifest.training.step, "match checkpoint"), world, kRefused);

  ChunkReader reader = make_reader(checkpoint, plan, staging.data());
  run_voting(reader, world, manifest.training.step, kRefused);
  for (const StagedEntry& s : plan.staged)
    std::memcpy(state[s.entry].data, staging.data() + s.offset, s.bytes);
  return manifest.training;
}

std::optional<LoadedCheckpoint> load_newest(const std::string& folder, const ShardedState& state,
                                            const std::vector<TensorAlias>& aliases,
                                            comm::Group& world, const LoadOptions& options) {
  std::vector<std::string> passed_over;
  for (const Candidate& c : shared_list(folder, world, options)) {
    if (!c.fault.empty()) {
      passed_over.push_back(c.fault);
      continue;
    }
    try {
      TrainingState training = load_checkpoint(c.path, state, aliases, world, options);
      return LoadedCheckpoint{
          .path = c.path, .training = std::move(training), .passed_over = std::move(passed_over)};
    } catch (const FileError& e) {
      passed_over.push_back(e.what());
    }
  }
  if (passed_over.empty()) return std::nullopt;
  raise<FileError>("{}: no sound checkpoint: {}", folder, fmt::join(passed_over, "; "));
}

}  // namespace dovetail

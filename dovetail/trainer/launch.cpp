#include "dovetail/trainer/launch.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <fstream>

#include "dovetail/base/cores.h"
#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/checkpoint/vote.h"
#include "dovetail/comm/c10d/world.h"
#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/threads/hub.h"
#include "dovetail/storage/tensor_heap.h"
#include "dovetail/trainer/local_ranks.h"
#include "dovetail/trainer/run_setup.h"
#include "dovetail/trainer/training_run.h"

namespace dovetail::trainer {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

// The command that each rank runs: this one, without --nproc.
std::vector<std::string> rank_command(const TrainCommand& command, const std::string& program) {
  std::vector<std::string> words{program, "train", command.config};
  for (const std::string& o : command.overrides) words.insert(words.end(), {"--set", o});
  if (command.resume) words.emplace_back("--resume");
  if (command.evaluate) words.emplace_back("--eval");
  if (command.trace) words.emplace_back("--trace");
  return words;
}

// Rank 0 makes the folder and writes the configuration; the others wait, and share its fault.
void prepare(const Config& config, const TrainCommand& command, comm::Group& world) {
  std::string kept;
  const Ballot mine = attempt([&] {
    if (world.rank() != 0) return std::string();
    const std::string folder = config.run_folder();
    kept = prepare_folder(folder, command.resume || command.evaluate);
    if (command.evaluate) return std::string();
    std::ofstream out(folder + "/config.toml", std::ios::trunc);
    out << to_toml(config) << std::flush;
    if (!out) raise<FileError>("{}/config.toml: cannot write", folder);
    return std::string();
  });
  throw_if_failed(vote(world, mine, 0, "run folder"), world, "run folder");
  if (!kept.empty()) say(fmt::format("an earlier run is kept as {}", kept));
}

// What can be found wrong before any rank starts.
void check_job(const Config& config, int64_t ranks) {
  schedule_of(config.optimizer, config.train.steps);
  share_of(config.train, 0, ranks);
  plan::validate(plan_options(config.shard, ranks).degrees, ranks);
  const int64_t on_host = config.comm.ranks_per_host;
  if (on_host == 0) return;
  if (config.comm.backend != "auto" && config.comm.backend != "peer")
    raise<ConfigError>("comm.ranks_per_host {}: wanted comm.backend auto or peer, got {}", on_host,
                       config.comm.backend);
  if (ranks % on_host != 0)
    raise<ConfigError>("comm.ranks_per_host: wanted 0 or a divisor of the {} ranks, got {}", ranks, on_host);
  if (on_host == 1 && ranks > 1 && config.comm.backend == "peer")
    raise<ConfigError>("comm.ranks_per_host 1: wanted 2 or more with comm.backend peer, whose ranks share "
                       "their host's memory");
}

int run_rank(const Config& config, const TrainCommand& command, const LaunchInfo& job) {
  if (config.run.tensor_heap) TensorHeap::install();
  at::set_num_threads(threads_per_rank(config.run.threads, usable_cores(), job.local_size));
  const StopSignal stop;
  const std::shared_ptr<comm::Group> world = make_job_world(job, config.comm);
  TrainingRun run(config, world);
  prepare(config, command, *world);
  agree(*world, hash64(fmt::format("{} {} {}", command.resume, command.evaluate, command.trace)),
        "command line (--resume, --eval, --trace)");
  if (command.trace) run.trace_steps();
  const bool resumed = (command.resume || command.evaluate) && run.resume();
  if (!command.evaluate) {
    run.train(&stop);
    return 0;
  }
  if (!resumed)
    raise<FileError>("{}/checkpoints: wanted a checkpoint to evaluate, found none",
                     config.run_folder());
  const ValidationResult result = run.evaluate();
  if (world->rank() == 0)
    say(fmt::format(
        "step {}: validation {:.6f} nats per token over {} tokens{}", run.progress().step,
        result.loss, result.tokens,
        run.is_text() ? fmt::format(", {:.6f} bits per byte", result.bits_per_token()) : ""));
  return 0;
}

}  // namespace

int threads_per_rank(int64_t asked, int cores, int local_ranks) {
  return asked > 0 ? static_cast<int>(asked) : std::max(1, cores / std::max(1, local_ranks));
}

std::shared_ptr<comm::Group> make_job_world(const LaunchInfo& job, const CommConfig& config) {
  const std::chrono::milliseconds deadline = milliseconds(config.deadline_seconds);
  if (job.size == 1)
    return comm::make_p2p_world(comm::make_thread_link(std::make_shared<comm::Hub>(1), 0),
                                deadline);
  comm::WorldOptions options;
  options.rank = job.rank;
  options.size = job.size;
  options.address = job.address;
  options.port = static_cast<uint16_t>(job.port);
  options.holds_store = job.rank == 0 && !job.store_elsewhere;
  options.name = fmt::format("dovetail-{}", job.attempt);
  const bool shares = config.backend == "auto" || config.backend == "peer";
  if (config.backend == "gloo_native") options.backend = comm::WorldBackend::gloo_native;
  if (shares)
    options.peers = comm::PeerOptions{.ranks_per_host = static_cast<int>(config.ranks_per_host),
                                      .required = config.backend == "peer"};
  options.interface = config.interface;
  options.deadline = deadline;
  options.connect = milliseconds(config.connect_seconds);
  return comm::make_world(options);
}

int run_train_command(const TrainCommand& command, const std::string& program,
                      const Environment& environment) {
  if (command.trace && command.evaluate) raise<ConfigError>("--trace: wanted steps of training, got --eval");
  const Config config = load_config(command.config, command.overrides);
  std::optional<LaunchInfo> job = launch_info(environment);
  if (job && job->launcher == "torchrun" && command.ranks > 0)
    raise<ConfigError>(
        "--nproc {}: a launcher has started this process as rank {} of {}: wanted one of the two",
        command.ranks, job->rank, job->size);
  if (job && command.ranks == 0) {
    check_job(config, job->size);
    return run_rank(config, command, *job);
  }
  const int ranks = command.ranks > 0 ? command.ranks : static_cast<int>(config.run.ranks);
  check_job(config, ranks);
  if (ranks == 1) return run_rank(config, command, LaunchInfo{.launcher = "none", .address = {}});
  return run_local_ranks(
      {rank_command(command, program), ranks, milliseconds(config.comm.deadline_seconds + 20)});
}

}  // namespace dovetail::trainer

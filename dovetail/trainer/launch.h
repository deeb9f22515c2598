// `dovetail train`: from a command line and an environment to a rank that trains.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "dovetail/comm/group.h"
#include "dovetail/trainer/config.h"
#include "dovetail/trainer/launch_info.h"

namespace dovetail::trainer {

struct TrainCommand {
  std::string config;                  // path
  int ranks = 0;                       // --nproc; 0: not said
  std::vector<std::string> overrides;  // --set
  bool resume = false;
  bool evaluate = false;  // --eval
  bool trace = false;     // --trace
};

// Joins the job that a launcher's variables describe; without any starts local ranks:
// `command.ranks`, or run.ranks of the configuration. One rank alone trains in this process.
// `program` is argv[0]. Returns the exit code; throws Error. Call it before anything else has
// started threads.
int run_train_command(const TrainCommand& command, const std::string& program,
                      const Environment& environment);

// The group of all ranks of the job.
std::shared_ptr<comm::Group> make_job_world(const LaunchInfo& job, const CommConfig& config);

// Threads inside operations for each rank of this host: `asked`, or the cores that this process may
// use, shared.
int threads_per_rank(int64_t asked, int cores, int local_ranks);

}  // namespace dovetail::trainer

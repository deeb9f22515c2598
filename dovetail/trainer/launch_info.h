// Which rank of which job this process is, from the variables that launchers set. A pure function
// of the environment.
//
//   launcher    rank                  size                  on this host            meeting place
//   torchrun    RANK                  WORLD_SIZE            LOCAL_RANK, LOCAL_...   MASTER_ADDR,
//   MASTER_PORT mpirun      OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_
//   MASTER_ADDR, or this host srun        SLURM_PROCID          SLURM_NTASKS          SLURM_LOCALID
//   first of SLURM_STEP_NODELIST PMI         PMI_RANK              PMI_SIZE MPI_LOCALRANKID
//   MASTER_ADDR, or this host
// The first whose rank and size are both set is taken. MASTER_ADDR and MASTER_PORT, where set,
// always win. Without a port, one follows from the job's identity, so that jobs on one host do not
// meet. A launcher that is silent about hosts is taken to have started all ranks on this one.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace dovetail::trainer {

struct LaunchInfo {
  std::string launcher;  // "torchrun", "mpirun", "srun", "pmi", or "none" for one process alone
  int rank = 0;
  int size = 1;
  int local_rank = 0;  // among the ranks on this host
  int local_size = 1;
  std::string address;  // where rank 0's host keeps the store
  int port = 0;
  int attempt = 0;  // how often the launcher has restarted the job
  bool store_elsewhere =
      false;  // the launcher itself keeps the store (TORCHELASTIC_USE_AGENT_STORE)
  bool operator==(const LaunchInfo&) const = default;
};

using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment process_environment();

// Nothing where no launcher speaks. Throws ConfigError naming the variable, what was wanted and
// what was got.
std::optional<LaunchInfo> launch_info(const Environment& environment);

// "gpu[03-05,9],login1" -> "gpu03". Throws ConfigError for a list it cannot read.
std::string first_host(std::string_view node_list);

}  // namespace dovetail::trainer

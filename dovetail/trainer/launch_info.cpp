#include "dovetail/trainer/launch_info.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"

namespace dovetail::trainer {
namespace {

// Reads variables of one environment.
class Variables {
 public:
  explicit Variables(const Environment& environment) : environment_(environment) {}

  std::optional<std::string> text(const std::string& name) const {
    auto value = environment_(name);
    if (value && value->empty()) return std::nullopt;
    return value;
  }
  bool has(const std::string& name) const { return text(name).has_value(); }

  int number(const std::string& name, int low, int high) const {
    const std::string value = text(name).value_or("");
    int n = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), n);
    if (error != std::errc{} || end != value.data() + value.size() || n < low || n > high)
      raise<ConfigError>("environment: {}: wanted an integer from {} to {}, got '{}'", name, low,
                         high, value);
    return n;
  }
  int number_or(const std::string& name, int low, int high, int otherwise) const {
    return has(name) ? number(name, low, high) : otherwise;
  }

 private:
  const Environment& environment_;
};

constexpr int kMaxRanks = 1 << 20;

struct Names {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* job;  // identifies the job among those on a host
};

constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE"},
    {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE",
     "SLURM_JOB_ID"},
    {"pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"},
};

const Names* speaking_launcher(const Variables& variables) {
  for (const Names& names : kLaunchers)
    if (variables.has(names.rank) && variables.has(names.size)) return &names;
  return nullptr;
}

int local_size_of(const Variables& variables, const Names& names, const LaunchInfo& info) {
  const auto value = variables.text(names.local_size);
  // Slurm writes "4(x2),3": tasks on the first nodes; they differ at most for the last ones.
  if (std::string_view(names.launcher) == "srun" && value) {
    int n = 0;
    std::from_chars(value->data(), value->data() + value->size(), n);
    return std::max(n, info.local_rank + 1);
  }
  return variables.number_or(names.local_size, info.local_rank + 1, info.size, info.size);
}

std::string address_of(const Variables& variables, const Names& names, const LaunchInfo& info) {
  if (auto address = variables.text("MASTER_ADDR")) return *address;
  if (auto nodes = variables.text("SLURM_STEP_NODELIST")) return first_host(*nodes);
  if (auto nodes = variables.text("SLURM_JOB_NODELIST")) return first_host(*nodes);
  if (info.local_size == info.size) return "127.0.0.1";
  raise<ConfigError>(
      "environment: {}: {} ranks on several hosts, wanted MASTER_ADDR (the host of rank 0), got "
      "nothing",
      names.launcher, info.size);
}

int port_of(const Variables& variables, const Names& names) {
  if (variables.has("MASTER_PORT")) return variables.number("MASTER_PORT", 1, 65535);
  const std::string job = variables.text(names.job).value_or("");
  return 20000 + static_cast<int>(hash64(job) % 20000);
}

}  // namespace

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (!value) return std::nullopt;
    return std::string(value);
  };
}

std::optional<LaunchInfo> launch_info(const Environment& environment) {
  const Variables variables(environment);
  const Names* names = speaking_launcher(variables);
  if (!names) return std::nullopt;
  LaunchInfo info;
  info.launcher = names->launcher;
  info.size = variables.number(names->size, 1, kMaxRanks);
  info.rank = variables.number(names->rank, 0, info.size - 1);
  info.local_rank = variables.number_or(names->local_rank, 0, info.size - 1, info.rank);
  info.local_size = local_size_of(variables, *names, info);
  info.address = address_of(variables, *names, info);
  info.port = port_of(variables, *names);
  info.attempt = variables.number_or("TORCHELASTIC_RESTART_COUNT", 0, kMaxRanks, 0);
  info.store_elsewhere = variables.text("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return info;
}

std::string first_host(std::string_view node_list) {
  const size_t open = node_list.find('[');
  const size_t comma = node_list.find(',');
  if (open == std::string_view::npos || comma < open)
    return std::string(node_list.substr(0, comma));
  const size_t close = node_list.find(']', open);
  const std::string_view inside =
      node_list.substr(open + 1, close == std::string_view::npos ? close : close - open - 1);
  const std::string_view number = inside.substr(0, inside.find_first_of(",-"));
  if (close == std::string_view::npos || number.empty())
    raise<ConfigError>("environment: node list: wanted NAME or NAME[numbers], got '{}'", node_list);
  const std::string_view rest = node_list.substr(close + 1);
  const std::string_view suffix = rest.substr(0, rest.find_first_of(",["));
  return std::string(node_list.substr(0, open)).append(number).append(suffix);
}

}  // namespace dovetail::trainer

#include "dovetail/trainer/launch_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "dovetail/base/error.h"
#include "tests/trainer/temporary.h"

namespace dovetail::trainer {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

std::optional<LaunchInfo> info_of(const Variables& variables) {
  return launch_info([&](const std::string& name) -> std::optional<std::string> {
    const auto it = variables.find(name);
    return it == variables.end() ? std::nullopt : std::optional(it->second);
  });
}

TEST(LaunchInfo, NothingWithoutALauncher) {
  EXPECT_EQ(info_of({}), std::nullopt);
  EXPECT_EQ(info_of({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}}), std::nullopt);
  EXPECT_EQ(info_of({{"RANK", "1"}}), std::nullopt);
}

TEST(LaunchInfo, Torchrun) {
  const Variables v{{"RANK", "5"},
                    {"WORLD_SIZE", "8"},
                    {"LOCAL_RANK", "1"},
                    {"LOCAL_WORLD_SIZE", "4"},
                    {"MASTER_ADDR", "head"},
                    {"MASTER_PORT", "1234"},
                    {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                    {"TORCHELASTIC_RESTART_COUNT", "3"}};
  EXPECT_EQ(info_of(v), (LaunchInfo{"torchrun", 5, 8, 1, 4, "head", 1234, 3, true}));
}

TEST(LaunchInfo, MpirunOnOneHostMeetsOnLoopback) {
  const Variables v{{"OMPI_COMM_WORLD_RANK", "1"},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                    {"PMIX_NAMESPACE", "job-a"}};
  const LaunchInfo a = info_of(v).value();
  EXPECT_EQ(a.launcher, "mpirun");
  EXPECT_EQ(a.rank, 1);
  EXPECT_EQ(a.address, "127.0.0.1");
  EXPECT_GE(a.port, 20000);
  Variables other = v;
  other["OMPI_COMM_WORLD_RANK"] = other["OMPI_COMM_WORLD_LOCAL_RANK"] = "0";
  EXPECT_EQ(info_of(other)->port, a.port);  // all ranks of a job agree
  other["PMIX_NAMESPACE"] = "job-b";
  EXPECT_NE(info_of(other)->port, a.port);  // two jobs on a host do not meet
}

TEST(LaunchInfo, MpirunOnSeveralHostsNeedsAnAddress) {
  Variables v{{"OMPI_COMM_WORLD_RANK", "3"},
              {"OMPI_COMM_WORLD_SIZE", "4"},
              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  EXPECT_THAT(message_of<ConfigError>([&] { info_of(v); }), HasSubstr("wanted MASTER_ADDR"));
  v["MASTER_ADDR"] = "head";
  EXPECT_EQ(info_of(v)->address, "head");
}

TEST(LaunchInfo, SrunTakesTheFirstNode) {
  const Variables v{{"SLURM_PROCID", "6"},
                    {"SLURM_NTASKS", "8"},
                    {"SLURM_LOCALID", "2"},
                    {"SLURM_JOB_ID", "77"},
                    {"SLURM_TASKS_PER_NODE", "4(x2)"},
                    {"SLURM_STEP_NODELIST", "gpu[03-04]"}};
  const LaunchInfo a = info_of(v).value();
  EXPECT_EQ(a.launcher, "srun");
  EXPECT_EQ(a.rank, 6);
  EXPECT_EQ(a.local_rank, 2);
  EXPECT_EQ(a.local_size, 4);
  EXPECT_EQ(a.address, "gpu03");
}

TEST(LaunchInfo, PmiAndSilenceAboutHosts) {
  const LaunchInfo a = info_of({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}}).value();
  EXPECT_EQ(a.launcher, "pmi");
  EXPECT_EQ(a.local_rank, 1);
  EXPECT_EQ(a.local_size, 3);
  EXPECT_EQ(a.address, "127.0.0.1");
}

TEST(LaunchInfo, BadNumbersNameTheVariable) {
  EXPECT_EQ(message_of<ConfigError>([] { info_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}); }),
            "environment: RANK: wanted an integer from 0 to 1, got '2'");
  EXPECT_THAT(message_of<ConfigError>([] { info_of({{"RANK", "0"}, {"WORLD_SIZE", "two"}}); }),
              HasSubstr("WORLD_SIZE: wanted an integer from 1"));
  EXPECT_THAT(
      message_of<ConfigError>([] {
        info_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "0"}});
      }),
      HasSubstr("MASTER_PORT: wanted an integer from 1 to 65535, got '0'"));
}

TEST(LaunchInfo, FirstHostOfANodeList) {
  EXPECT_EQ(first_host("a"), "a");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("n[7,9-12]"), "n7");
  EXPECT_EQ(first_host("n[007-012],x1"), "n007");
  EXPECT_EQ(first_host("login,n[1-2]"), "login");
  EXPECT_EQ(first_host("r[1-2]-ib,r9"), "r1-ib");
  EXPECT_THROW(first_host("n[1-2"), ConfigError);
}

}  // namespace
}  // namespace dovetail::trainer

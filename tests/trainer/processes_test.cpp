// The real program: ranks as processes, launchers, signals, kills.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include <unistd.h>

#include "dovetail/checkpoint/folder.h"
#include "dovetail/trainer/mapped_file.h"
#include "tests/trainer/process.h"
#include "tests/trainer/run_fixture.h"

namespace dovetail::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class Processes : public ::testing::Test {
 protected:
  std::string at(const std::string& name) const { return folder_.file(name); }

  // Writes the configuration of a run and returns `train CONFIG` with the overrides.
  std::vector<std::string> command(const std::string& run,
                                   const std::vector<std::string>& overrides = {}) {
    std::vector<std::string> words{"train",
                                   folder_.write(run + ".toml", tiny_config(at(run), data_))};
    for (const std::string& o : overrides) words.insert(words.end(), {"--set", o});
    return words;
  }
  static std::vector<std::string> with(std::vector<std::string> words,
                                       const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  Ended run(const std::vector<std::string>& words, const Program::Variables& variables = {}) {
    return run_program(words, at("output.txt"), variables);
  }

  // Waits until the run has written the metrics of that many steps.
  bool wait_for_steps(Program& program, const std::string& run, size_t steps) {
    while (program.running()) {
      if (step_lines(at(run)).size() >= steps) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  void expect_same_steps(const std::string& a, const std::string& b) {
    const auto expected = step_lines(at(a)), got = step_lines(at(b));
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      for (const char* key : {"step", "loss", "grad_norm", "position"})
        EXPECT_EQ(got[i].at(key), expected[i].at(key)) << key << " of step " << i + 1;
  }

  TemporaryFolder folder_;
  std::string data_ = folder_.write("text.txt", tiny_text(6000));
};

TEST_F(Processes, LocalRanksTrainEvaluateAndKeepTheEarlierRun) {
  Ended ended = run(with(command("run"), {"--nproc", "2"}));
  ASSERT_EQ(ended.code, 0) << ended.output;
  for (const char* part : {"on 2 ranks, degrees 2,2,2", "step 6/6", "tokens/s  ETA", "validation",
                           "bits per byte", "checkpoint", "sample:", "report.html"})
    EXPECT_THAT(ended.output, HasSubstr(part));
  EXPECT_EQ(step_lines(at("run")).size(), 6u);
  const auto lines = read_metrics(at("run") + "/metrics.jsonl");
  double loss = 0;
  for (const auto& line : lines) loss = line.value("val_loss", loss);

  ended = run(with(command("run"), {"--nproc", "2", "--eval"}));
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output,
              HasSubstr(fmt::format("validation {:.6f} nats per token over 192 tokens", loss)));
  EXPECT_EQ(step_lines(at("run")).size(), 6u);  // nothing was trained

  ended = run(with(command("run"), {"--set", "run.ranks=2", "--set", "train.steps=2", "--set",
                                    "optimizer.warmup_steps=0"}));
  ASSERT_EQ(ended.code, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("an earlier run is kept as " + at("run") + ".1"));
  EXPECT_EQ(step_lines(at("run.1")).size(), 6u);
  EXPECT_EQ(step_lines(at("run")).size(), 2u);
}

TEST_F(Processes, LossesDoNotDependOnWhereTensorsLie) {
  const Ended heap = run(with(command("run"), {"--nproc", "2"}));
  ASSERT_EQ(heap.code, 0) << heap.output;
#ifndef __SANITIZE_ADDRESS__
  EXPECT_THAT(heap.output, Not(HasSubstr("tensors from malloc")));
#endif
  const Ended malloc = run(command("malloc", {"run.ranks=2", "run.tensor_heap=false"}));
  ASSERT_EQ(malloc.code, 0) << malloc.output;
  EXPECT_THAT(malloc.output, HasSubstr("tensors from malloc"));
  expect_same_steps("malloc", "run");
}

// Ranks agree with threads: the same losses, bit for bit.
TEST_F(Processes, GiveTheLossesOfRanksAsThreads) {
  const Ended ended = run(with(command("run"), {"--nproc", "2"}));
  ASSERT_EQ(ended.code, 0) << ended.output;
  train_job(2, parse_config(tiny_config(at("threads"), data_), "tiny.toml", {}));
  expect_same_steps("threads", "run");
}

// Of a launcher that starts two ranks.
Program::Variables job_of_two(const std::string& rank, const std::string& name) {
  return {{"OMPI_COMM_WORLD_RANK", rank},
          {"OMPI_COMM_WORLD_SIZE", "2"},
          {"OMPI_COMM_WORLD_LOCAL_RANK", rank},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
          {"PMIX_NAMESPACE", name + "-" + std::to_string(::getpid())}};
}

TEST_F(Processes, JoinTheJobOfALauncher) {
  const auto words = command("run");
  Program second(words, at("second.txt"), job_of_two("1", "job"));
  const Ended first = run(words, job_of_two("0", "job"));
  ASSERT_EQ(first.code, 0) << first.output;
  EXPECT_EQ(second.wait(), 0) << second.output();
  EXPECT_THAT(first.output, HasSubstr("on 2 ranks"));
  EXPECT_EQ(second.output(), "");  // rank 0 alone speaks
  EXPECT_EQ(step_lines(at("run")).size(), 6u);
}

TEST_F(Processes, OfOneJobHaveOneCommandLine) {
  const auto words = command("run");
  for (const std::string flag : {"--trace", "--eval", "--resume"}) {
    Program second(with(words, {flag}), at("second.txt"), job_of_two("1", "differ" + flag));
    const Ended first = run(words, job_of_two("0", "differ" + flag));
    EXPECT_EQ(first.code, 2) << first.output;
    EXPECT_EQ(second.wait(), 2) << second.output();
    EXPECT_THAT(first.output + second.output(),
                HasSubstr("command line (--resume, --eval, --trace): rank 1 has another"));
  }
}

TEST_F(Processes, ComeTogetherInTheTimeThatIsSaid) {
  const auto begun = std::chrono::steady_clock::now();
  const Ended alone = run(command("run", {"comm.connect_seconds=1.5"}), job_of_two("0", "alone"));
  EXPECT_NE(alone.code, 0);
  EXPECT_THAT(alone.output, HasSubstr("rank 1"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(30));  // not the minute of the default
}

TEST_F(Processes, SigtermWritesACheckpointAndResumeGoesOn) {
  const std::vector<std::string> overrides{"train.steps=60", "checkpoint.every=0"};
  ASSERT_EQ(run(with(command("whole", overrides), {"--nproc", "2"})).code, 0);
  Program program(with(command("run", overrides), {"--nproc", "2"}), at("first.txt"));
  ASSERT_TRUE(wait_for_steps(program, "run", 5)) << program.output();
  program.signal(SIGTERM);
  ASSERT_EQ(program.wait(), 0) << program.output();
  EXPECT_THAT(program.output(), HasSubstr("as asked; --resume goes on from there"));
  const auto checkpoints = list_checkpoints(at("run") + "/checkpoints");
  ASSERT_EQ(checkpoints.size(), 1u);
  EXPECT_EQ(static_cast<size_t>(checkpoints[0].name.step), step_lines(at("run")).size());
  EXPECT_LT(checkpoints[0].name.step, 60);
  const Ended resumed = run(with(command("run", overrides), {"--nproc", "2", "--resume"}));
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr("resumed from"));
  expect_same_steps("whole", "run");
}

// Case B20: a rank is killed while the second checkpoint is being written.
TEST_F(Processes, KilledWhileACheckpointIsWritten) {
  // Large enough for a write to take a while.
  const std::vector<std::string> overrides{"train.steps=24", "checkpoint.every=10",
                                           "model.hidden_size=128", "model.intermediate_size=2048",
                                           "train.micro_batch=2"};
  ASSERT_EQ(run(with(command("whole", overrides), {"--nproc", "2"})).code, 0);
  const std::string checkpoints = at("run") + "/checkpoints";
  auto writing_second = [&] {
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(checkpoints, error)) {
      const std::string name = entry.path().filename().string();
      if (name.starts_with(kWritingPrefix) && name.find("20") != std::string::npos) return true;
    }
    return false;
  };
  bool caught = false;
  for (int attempt = 0; attempt < 5 && !caught; ++attempt) {
    fs::remove_all(at("run"));
    Program program(with(command("run", overrides), {"--nproc", "2"}), at("killed.txt"));
    while (program.running() && !writing_second())
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    const auto ranks = program.children();
    if (ranks.size() == 2) ::kill(ranks[1], SIGKILL);
    const int code = program.wait();
    caught = code != 0 && writing_second() && !fs::exists(checkpoints + "/step-00000020");
    if (!caught) continue;
    EXPECT_EQ(code, 128 + SIGKILL);
    EXPECT_THAT(program.output(), HasSubstr("rank 1 was ended by signal 9"));
    EXPECT_THAT(program.output(), HasSubstr("[rank 0] dovetail: error: "));
  }
  ASSERT_TRUE(caught) << "no kill hit the time of writing";
  const Ended resumed = run(with(command("run", overrides), {"--nproc", "2", "--resume"}));
  ASSERT_EQ(resumed.code, 0) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr("passed over"));
  EXPECT_THAT(resumed.output, HasSubstr("step-00000010 at step 10"));
  expect_same_steps("whole", "run");
}

TEST_F(Processes, ADamagedCheckpointIsNamedAndRefused) {
  ASSERT_EQ(run(with(command("run", {"checkpoint.every=0"}), {"--nproc", "2"})).code, 0);
  const std::string checkpoint = at("run") + "/checkpoints/step-00000006";
  std::string file;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    if (entry.path().filename() != "manifest.json" && entry.file_size() > 0)
      file = entry.path().string();
  ASSERT_NE(file, "");
  std::string bytes = read_text_file(file);
  bytes[bytes.size() / 2] ^= 4;  // one bit
  std::ofstream(file, std::ios::binary) << bytes;
  EXPECT_EQ(run({"ckpt", "verify", checkpoint}).code, 1);
  const Ended resumed = run(with(command("run"), {"--nproc", "2", "--resume"}));
  EXPECT_EQ(resumed.code, 1) << resumed.output;
  EXPECT_THAT(resumed.output, HasSubstr(fs::path(file).filename().string()));
  fs::resize_file(file, bytes.size() / 2);
  EXPECT_THAT(run({"ckpt", "inspect", at("run") + "/checkpoints"}).output,
              HasSubstr(fs::path(file).filename().string()));
}

TEST_F(Processes, ADeadRankIsAnErrorOnTheOthersWithinTheDeadline) {
  Program program(
      with(command("run", {"train.steps=100000", "checkpoint.every=0", "comm.deadline_seconds=8"}),
           {"--nproc", "3", "--set", "train.batch=6"}),
      at("dead.txt"));
  ASSERT_TRUE(wait_for_steps(program, "run", 3)) << program.output();
  const auto ranks = program.children();
  ASSERT_EQ(ranks.size(), 3u);
  const auto start = std::chrono::steady_clock::now();
  ::kill(ranks[2], SIGKILL);
  EXPECT_EQ(program.wait(std::chrono::seconds(40)), 128 + SIGKILL);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_THAT(program.output(), HasSubstr("rank 2 was ended by signal 9"));
  for (const char* part : {"[rank 0] dovetail: error: ", "rank 2"})
    EXPECT_THAT(program.output(), HasSubstr(part));
}

TEST_F(Processes, BadConfigurationsAreOneLineBeforeAnyRankStarts) {
  const Ended ended = run(with(command("run", {"train.step=3"}), {"--nproc", "2"}));
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.output,
            "dovetail: error: config: train.step: unknown key; did you mean steps?\n");
  EXPECT_FALSE(fs::exists(at("run")));
  EXPECT_EQ(run(with(command("run", {"train.batch=5"}), {"--nproc", "2"})).output,
            "dovetail: error: train.batch: wanted a multiple of the 2 ranks, got 5\n");
  const auto on_hosts = [&](const std::string& ranks, const std::string& backend) {
    const auto words = command("run", {"train.batch=4", "comm.ranks_per_host=" + ranks, "comm.backend=" + backend});
    return run(with(words, {"--nproc", "4"})).output;
  };
  EXPECT_EQ(on_hosts("3", "auto"),
            "dovetail: error: comm.ranks_per_host: wanted 0 or a divisor of the 4 ranks, got 3\n");
  EXPECT_EQ(on_hosts("2", "c10d"),
            "dovetail: error: comm.ranks_per_host 2: wanted comm.backend auto or peer, got c10d\n");
  EXPECT_THAT(on_hosts("1", "peer"), HasSubstr("comm.ranks_per_host 1: wanted 2 or more with comm.backend peer"));
  EXPECT_EQ(run({"train", at("missing.toml")}).code, 1);
  EXPECT_EQ(run({"train"}).code, 2);
}

TEST_F(Processes, PlanRefusesWhatItWouldIgnoreAndEndsWithTwo) {
  const std::string instance =
      folder_.write("i.json", R"({"zero1":5,"zero3":5,"segments":1,"tensors":[[12,6],[6,6]]})");
  EXPECT_EQ(run({"plan", "--instance", instance, "--json"}).code, 0);
  const Ended ended = run({"plan", "--instance", instance, "--segments", "2"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_THAT(ended.output, HasSubstr("--instance excludes --segments"));
  const std::string bad =
      folder_.write("bad.json", R"({"zero1":5,"zero3":2,"segments":1,"tensors":[[12,6]]})");
  EXPECT_EQ(run({"plan", "--instance", bad}).code, 2);
}

// What every rank finds wrong is said once.
TEST_F(Processes, AFaultOfAllRanksIsSaidOnce) {
  const Ended ended = run(with(command("run", {"data.sources=['/nowhere']"}), {"--nproc", "2"}));
  EXPECT_EQ(ended.code, 2);
  const size_t first = ended.output.find("/nowhere: no such file");
  ASSERT_NE(first, std::string::npos) << ended.output;
  EXPECT_EQ(ended.output.find("/nowhere: no such file", first + 1), std::string::npos)
      << ended.output;
}

}  // namespace
}  // namespace dovetail::trainer

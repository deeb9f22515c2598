// `dovetail train --trace`, and a run over shared memory beside one over messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "dovetail/trainer/launch.h"
#include "tests/trainer/run_fixture.h"

namespace dovetail::trainer {
namespace {

class Tracing : public ::testing::Test {
 protected:
  Config config(const std::string& run, const std::vector<std::string>& overrides = {}) {
    return parse_config(tiny_config(folder_.file(run), data_), "tiny.toml", overrides);
  }
  std::string read(const std::string& name) const {
    std::ifstream in(folder_.file(name));
    std::stringstream text;
    text << in.rdbuf();
    return text.str();
  }

  TemporaryFolder folder_;
  std::string data_ = folder_.write("text.txt", tiny_text(6000));
};

TEST_F(Tracing, IsRefusedWithoutTraining) {
  TrainCommand command;
  command.config = folder_.file("none.toml");
  command.trace = command.evaluate = true;
  EXPECT_THAT([&] { run_train_command(command, "dovetail", process_environment()); },
              ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("--trace")));
}

TEST_F(Tracing, LeavesAFileForPerfettoAndATableThatAddsUp) {
  // Validation and checkpoints fall between recorded steps and are in none.
  const Config c = config("run", {"train.validate_every=2", "shard.format=bf16"});
  run_job(2, c, false, [](TrainingRun& run) {
    run.trace_steps();
    run.train(nullptr);
  });
  const auto trace = nlohmann::json::parse(read("run/trace.json"));
  std::map<int, double> steps;
  std::map<int, int> count;
  for (const auto& event : trace.at("traceEvents")) {
    const int rank = event.at("pid");
    if (event.at("ph") == "M") {
      EXPECT_EQ(event.at("args").at("name"), "rank " + std::to_string(rank));
      continue;
    }
    EXPECT_EQ(event.at("ph"), "X");
    EXPECT_GE(event.at("ts").get<double>(), 0);
    EXPECT_GE(event.at("dur").get<double>(), 0);
    if (const std::string name = event.at("name"); name.starts_with("step ")) {
      steps[rank] += event.at("dur").get<double>() / 1e3;
      ++count[rank];
    }
  }
  EXPECT_EQ(count, (std::map<int, int>{{0, 4}, {1, 4}})) << "six steps, the first two without";

  std::istringstream table(read("run/trace.txt"));
  std::string word, line;
  std::getline(table, line);
  for (const char* kind : {"compute", "wait", "reduce", "update", "encode", "step"})
    EXPECT_NE(line.find(kind), std::string::npos) << line;
  for (int rank = 0; rank < 2; ++rank) {
    std::getline(table, line);
    std::istringstream row(line);
    int number = -1;
    row >> word >> number;
    EXPECT_EQ(word + std::to_string(number), "rank" + std::to_string(rank));
    double sum = 0, value = 0, step = 0;
    for (int kind = 0; kind < kDoings; ++kind) row >> value, sum += value;
    row >> step;
    EXPECT_NEAR(sum, step, 0.06 * kDoings) << line;  // five numbers with one decimal
    EXPECT_NEAR(step, steps[rank] / 4, 0.06) << line;
  }
}

TEST_F(Tracing, ARunThatEndsEarlyLeavesWhatItHas) {
  run_job(1, config("short", {"train.steps=3"}), false, [](TrainingRun& run) {
    run.trace_steps();
    run.train(nullptr);
  });
  EXPECT_NE(read("short/trace.txt").find("rank 0"), std::string::npos);
  run_job(1, config("none", {"train.steps=2", "optimizer.warmup_steps=1"}), false, [](TrainingRun& run) {
    run.trace_steps();
    run.train(nullptr);
  });
  EXPECT_EQ(read("none/trace.txt"), "");
}

TEST_F(Tracing, SharedMemoryTrainsTheSame) {
  for (const char* format : {"fp32", "bf16"}) {
    const std::vector<std::string> overrides{std::string("shard.format=") + format, "train.validate_every=2"};
    const Config messages = config(std::string("messages") + format, overrides);
    const Config memory = config(std::string("memory") + format, overrides);
    train_job(2, messages);
    prepare_folder(memory.run_folder(), false);
    comm::spawn_peers(2, [&](comm::Group& group) {
      TrainingRun run(memory, std::shared_ptr<comm::Group>(&group, [](comm::Group*) {}));
      run.train(nullptr);
    });
    const auto a = step_lines(messages.run_folder()), b = step_lines(memory.run_folder());
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      for (const char* key : {"loss", "grad_norm"}) EXPECT_EQ(a[i].at(key), b[i].at(key)) << format << " step " << i;
      EXPECT_LT(b[i].at("bytes_sent"), a[i].at("bytes_sent"));
    }
    // What one transport wrote the other goes on from.
    Config longer = config(std::string("memory") + format, overrides);
    longer.train.steps = 8;
    train_job(2, longer, /*resume=*/true);
    EXPECT_EQ(step_lines(memory.run_folder()).back().at("step"), 8);
  }
}

}  // namespace
}  // namespace dovetail::trainer

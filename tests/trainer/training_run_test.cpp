#include "dovetail/trainer/training_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <mutex>

#include "dovetail/base/error.h"
#include "dovetail/trainer/mapped_file.h"
#include "tests/trainer/run_fixture.h"

namespace dovetail::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;

class Training : public ::testing::Test {
 protected:
  Config config(const std::string& run, const std::vector<std::string>& overrides = {}) {
    return parse_config(tiny_config(folder_.file(run), data_), "tiny.toml", overrides);
  }
  std::string at(const std::string& name) const { return folder_.file(name); }

  TemporaryFolder folder_;
  std::string data_ = folder_.write("text.txt", tiny_text(6000));
};

TEST_F(Training, LeavesEverythingThatARunPromises) {
  train_job(2, config("run"));
  const auto steps = step_lines(at("run"));
  ASSERT_EQ(steps.size(), 6u);
  for (size_t i = 0; i < steps.size(); ++i) {
    EXPECT_EQ(steps[i].at("step"), i + 1);
    for (const char* key :
         {"loss", "lr", "grad_norm", "tokens_per_second", "step_ms", "bytes_sent", "bytes_held"})
      EXPECT_TRUE(steps[i].at(key).is_number()) << key;
    EXPECT_EQ(steps[i].at("tokens"), 64);
    EXPECT_EQ(steps[i].at("position"), 4 * (i + 1));
  }
  EXPECT_LT(steps.back().at("loss"), steps.front().at("loss"));
  const auto lines = read_metrics(at("run") + "/metrics.jsonl");
  const auto validation = std::find_if(lines.begin(), lines.end(),
                                       [](const auto& l) { return l.contains("val_loss"); });
  ASSERT_NE(validation, lines.end());
  EXPECT_NEAR(validation->at("val_bpb").get<double>(),
              validation->at("val_loss").get<double>() / 0.693147, 1e-5);
  EXPECT_TRUE(fs::exists(at("run") + "/checkpoints/step-00000003"));
  EXPECT_TRUE(fs::exists(at("run") + "/checkpoints/step-00000006"));
  EXPECT_THAT(read_text_file(at("run") + "/sample.txt"), HasSubstr("def "));
}

TEST_F(Training, RecomputationChangesNoLoss) {
  for (const std::string format : {"fp32", "bf16"})
    for (const int ranks : {1, 2}) {
      const std::string run = format + std::to_string(ranks);
      train_job(ranks, config(run, {"shard.format=" + format}));
      train_job(ranks, config(run + "r", {"shard.format=" + format, "shard.recompute=true"}));
      const auto plain = step_lines(at(run)), again = step_lines(at(run + "r"));
      ASSERT_EQ(again.size(), 6u);
      for (size_t i = 0; i < plain.size(); ++i) EXPECT_EQ(plain[i].at("loss"), again[i].at("loss"));
    }
}

TEST_F(Training, BytesSentAndHeldAreThoseOfThePlan) {
  std::mutex mutex;
  int64_t sent = 0, held = 0;  // rank 0's, as the plan predicts
  run_job(4, config("run", {"shard.zero3=2", "train.batch=8"}), false, [&](TrainingRun& run) {
    run.train(nullptr);
    EXPECT_EQ(run.engine().held(), run.engine().predicted_held());
    if (run.world().rank() != 0) return;
    const std::lock_guard lock(mutex);
    sent = plan::sent_bytes(run.engine().plan(), 0,
                            {.micro_batches = 2, .synchronise_each = true, .trainable = {}})
               .total();
    held = run.engine().predicted_held().total();
  });
  for (const auto& step : step_lines(at("run"))) {
    EXPECT_EQ(step.at("bytes_sent"), sent) << step;
    EXPECT_EQ(step.at("bytes_held"), held) << step;
  }
}

TEST_F(Training, ReportIsOnePageWithCurvesAndMap) {
  train_job(2, config("run"));
  const std::string page = read_text_file(at("run") + "/report.html");
  for (const char* part : {"Shard map", "rank 0", "rank 1", "validation, bits per byte",
                           "Memory of the engine", "q_proj.weight", "config.toml", "<polyline"})
    EXPECT_THAT(page, HasSubstr(part));
  EXPECT_THAT(page, HasSubstr("byte for byte, on 2 of 2 ranks"));
  for (const char* outside : {"http:", "https:", "src=", "@import", "url(//"})
    EXPECT_THAT(page, Not(HasSubstr(outside)));
}

// Resuming from the third step gives the losses of the run that never stopped, bit for bit, and the
// same file of metrics.
TEST_F(Training, ResumeIsAsIfItHadNeverStopped) {
  for (const int ranks : {1, 2}) {
    const std::string whole = "whole" + std::to_string(ranks),
                      half = "half" + std::to_string(ranks);
    train_job(ranks, config(whole));
    fs::create_directories(at(half) + "/checkpoints");
    fs::copy(at(whole) + "/checkpoints/step-00000003", at(half) + "/checkpoints/step-00000003",
             fs::copy_options::recursive);
    fs::copy(at(whole) + "/metrics.jsonl", at(half) + "/metrics.jsonl");
    train_job(ranks, config(half), true);
    const auto expected = step_lines(at(whole)), got = step_lines(at(half));
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      for (const char* key : {"step", "loss", "grad_norm", "lr", "position", "tokens"})
        EXPECT_EQ(got[i].at(key), expected[i].at(key))
            << key << " of step " << i + 1 << ", " << ranks << " ranks";
  }
}

TEST_F(Training, ResumeOnAnotherNumberOfRanksGoesOnAtTheSamePlace) {
  train_job(2, config("two"));
  fs::create_directories(at("four") + "/checkpoints");
  fs::copy(at("two") + "/checkpoints/step-00000003", at("four") + "/checkpoints/step-00000003",
           fs::copy_options::recursive);
  train_job(4, config("four"), true);
  const auto expected = step_lines(at("two")), got = step_lines(at("four"));
  ASSERT_EQ(got.size(), 3u);
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i].at("position"), expected[i + 3].at("position"));
    EXPECT_NEAR(got[i].at("loss").get<double>(), expected[i + 3].at("loss").get<double>(), 1e-4);
  }
}

TEST_F(Training, ResumeRefusesOtherDataAndSeeds) {
  train_job(1, config("run"));
  auto refusal = [&](const std::vector<std::string>& overrides) {
    return message_of<ConfigError>([&] { train_job(1, config("run", overrides), true); });
  };
  EXPECT_THAT(refusal({"run.seed=2"}),
              HasSubstr("resume: run.seed: the checkpoint has 1, this run 2"));
  EXPECT_THAT(refusal({"data.sequence=8"}), HasSubstr("resume: data.sequence"));
  EXPECT_THAT(refusal({"data.shuffle=false"}), HasSubstr("resume: data.shuffle"));
  EXPECT_THAT(refusal({"data.last_batch=keep"}), HasSubstr("resume: data.last_batch"));
  folder_.write("text.txt", tiny_text(6001));
  EXPECT_THAT(refusal({}), HasSubstr("resume: digest of the data"));
}

// N ranks with one micro-batch each and one rank with N of them see the same samples, and get
// nearly the same weights.
TEST_F(Training, RanksAndMicroBatchesAreInterchangeable) {
  train_job(1, config("one"));
  train_job(2, config("two"));
  train_job(4, config("four"));
  const auto one = step_lines(at("one")), two = step_lines(at("two")),
             four = step_lines(at("four"));
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(one[i].at("loss").get<double>(), two[i].at("loss").get<double>(), 2e-5);
    EXPECT_NEAR(one[i].at("loss").get<double>(), four[i].at("loss").get<double>(), 2e-5);
  }
  EXPECT_EQ(one[0].at("loss"), four[0].at("loss"));  // before any update: the same bits
}

TEST_F(Training, ValidationIsTheSameForAnyNumberOfRanks) {
  std::vector<double> losses;
  for (const int ranks : {1, 2, 4}) {
    std::mutex mutex;
    double loss = 0;
    run_job(ranks, config("v" + std::to_string(ranks)), false, [&](TrainingRun& run) {
      const ValidationResult result = run.evaluate();
      EXPECT_EQ(result.tokens, 12 * 16);
      const std::lock_guard lock(mutex);
      loss = result.loss;
    });
    losses.push_back(loss);
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(losses[0], losses[2]);
}

// Case B24: five samples for two ranks.
TEST_F(Training, FiveSamplesForTwoRanks) {
  data_ = folder_.write("five.txt", tiny_text(5 * 16));  // and the end mark
  const std::vector<std::string> common{"data.validation_fraction=0", "train.batch=2",
                                        "train.steps=5"};
  auto tokens = [&](const std::string& run) {
    std::vector<int64_t> out;
    for (const auto& line : step_lines(at(run))) out.push_back(line.at("tokens").get<int64_t>());
    return out;
  };
  auto with = [&](const char* last) {
    auto overrides = common;
    overrides.push_back(std::string("data.last_batch=") + last);
    return overrides;
  };
  train_job(2, config("drop", with("drop")));
  EXPECT_EQ(tokens("drop"), (std::vector<int64_t>{32, 32, 32, 32, 32}));
  EXPECT_EQ(step_lines(at("drop"))[2].at("position"), 7);  // the fifth sample was passed over
  train_job(2, config("keep", with("keep")));
  EXPECT_EQ(tokens("keep"), (std::vector<int64_t>{32, 32, 16, 32, 32}));
  EXPECT_EQ(step_lines(at("keep"))[2].at("position"), 5);
}

TEST_F(Training, ALossThatIsNotFiniteIsOneClearErrorAndLeavesNoCheckpoint) {
  const std::vector<std::string> wild{"optimizer.lr=1e30", "optimizer.warmup_steps=0",
                                      "train.clip=0", "checkpoint.every=0"};
  const std::string message = message_of<StateError>([&] { train_job(2, config("nan", wild)); });
  EXPECT_THAT(message, HasSubstr("not finite"));
  EXPECT_THAT(message, HasSubstr("step "));
  EXPECT_FALSE(fs::exists(at("nan") + "/checkpoints/step-00000006"));
  for (const auto& line : step_lines(at("nan"))) EXPECT_TRUE(line.at("loss").is_number());
}

TEST_F(Training, WeightsThatAreNotFiniteCostTheSampleAndNothingElse) {
  train_job(2, config("wild", {"optimizer.lr=1e20", "optimizer.warmup_steps=0", "train.clip=0",
                               "train.non_finite=skip"}));
  EXPECT_FALSE(fs::exists(at("wild") + "/sample.txt"));
  EXPECT_TRUE(fs::exists(at("wild") + "/report.html"));
}

TEST_F(Training, ModelsThatCannotBeAreNamed) {
  for (const char* bad : {"model.hidden_size=1000000000000", "model.hidden_size=7"})
    EXPECT_THAT(message_of<ConfigError>([&] { train_job(1, config("m", {bad})); }),
                HasSubstr("config: model: ")) << bad;
}

TEST_F(Training, SigtermEndsTheRunWithACheckpointOnAllRanks) {
  prepare_folder(at("run"), false);
  const StopSignal stop;
  std::raise(SIGTERM);
  EXPECT_STREQ(stop.name(), "SIGTERM");
  run_job(2, config("run"), false, [&](TrainingRun& run) {
    run.train(&stop);
    EXPECT_EQ(run.progress().step, 1);
  });
  EXPECT_TRUE(fs::exists(at("run") + "/checkpoints/step-00000001"));
  EXPECT_FALSE(fs::exists(at("run") + "/sample.txt"));
}

TEST_F(Training, EarlierRunsAreKept) {
  EXPECT_EQ(prepare_folder(at("r"), false), "");
  folder_.write("r/config.toml", "first");
  EXPECT_EQ(prepare_folder(at("r"), true), "");
  EXPECT_EQ(prepare_folder(at("r"), false), at("r") + ".1");
  EXPECT_EQ(read_text_file(at("r") + ".1/config.toml"), "first");
  folder_.write("r/config.toml", "second");
  EXPECT_EQ(prepare_folder(at("r"), false), at("r") + ".2");
}

TEST_F(Training, ImpossibleJobsAreRefused) {
  auto refusal = [&](int ranks, const std::vector<std::string>& overrides) {
    return message_of<ConfigError>([&] { train_job(ranks, config("bad", overrides)); });
  };
  EXPECT_THAT(refusal(3, {}), HasSubstr("train.batch: wanted a multiple of the 3 ranks, got 4"));
  EXPECT_THAT(refusal(2, {"train.micro_batch=3"}),
              HasSubstr("train.micro_batch: wanted a divisor of the 2 samples"));
  EXPECT_THAT(refusal(2, {"shard.zero1=1", "shard.zero3=2"}), HasSubstr("zero"));
  EXPECT_THAT(refusal(1, {"data.sequence=128"}),
              HasSubstr("data.sequence: wanted at most the model's context of 64"));
  EXPECT_THAT(refusal(1, {"model.vocab_size=100"}),
              HasSubstr("model.vocab_size: wanted at least the data's 256, got 100"));
  EXPECT_THAT(refusal(1, {"model.hiden_size=100"}), HasSubstr("hiden_size"));
  EXPECT_THAT(refusal(1, {"model.name=gpt"}), HasSubstr("llama"));
  EXPECT_THAT(refusal(2, {"data.sources=['/nowhere']"}), HasSubstr("/nowhere: no such file"));
  EXPECT_THAT(refusal(1, {"optimizer.rules=[{pattern='nothing*'}]"}), HasSubstr("nothing*"));
}

TEST_F(Training, RanksThatReadOtherDataAreRefused) {
  const std::string other = folder_.write("other.txt", tiny_text(6001));
  const auto body = [&](comm::Group& group) {
    Config mine = config("run");
    mine.data.sources = {group.rank() == 1 ? other : data_};
    TrainingRun run(mine, std::shared_ptr<comm::Group>(&group, [](comm::Group*) {}));
  };
  EXPECT_THAT(message_of<ConfigError>([&] { comm::spawn(2, body); }),
              HasSubstr("rank 1 has another than rank 0"));
}

}  // namespace
}  // namespace dovetail::trainer

// The trainer with every optimizer: resuming, checkpoints at other rank counts, configuration and
// what a run prints about it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "dovetail/base/error.h"
#include "dovetail/trainer/mapped_file.h"
#include "tests/state_digest.h"
#include "tests/trainer/run_fixture.h"

namespace dovetail::trainer {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class Optimizers : public ::testing::TestWithParam<std::string> {
 protected:
  Config config(const std::string& run, std::vector<std::string> overrides = {}) {
    // A model whose matrices are cut, with several tiles and 8-bit blocks each.
    overrides.insert(overrides.begin(),
                     {"optimizer.name=" + GetParam(), "model.hidden_size=64",
                      GetParam() == "sgd" ? "optimizer.lr=0.1" : "optimizer.lr=3e-3",
                      "muon.unit=head", "shampoo.block=24", "shampoo.every=2"});
    return parse_config(tiny_config(folder_.file(run), data_), "tiny.toml", overrides);
  }
  std::string at(const std::string& name) const { return folder_.file(name); }
  void copy_third_step(const std::string& from, const std::string& to) {
    fs::create_directories(at(to) + "/checkpoints");
    fs::copy(at(from) + "/checkpoints/step-00000003", at(to) + "/checkpoints/step-00000003",
             fs::copy_options::recursive);
  }

  TemporaryFolder folder_;
  std::string data_ = folder_.write("text.txt", tiny_text(6000));
};

TEST_P(Optimizers, LearnsAndResumesAsIfItHadNeverStopped) {
  for (const int ranks : {1, 2}) {
    const std::string whole = "whole" + std::to_string(ranks), half = "half" + std::to_string(ranks);
    train_job(ranks, config(whole));
    copy_third_step(whole, half);
    train_job(ranks, config(half), true);
    const auto expected = step_lines(at(whole)), got = step_lines(at(half));
    ASSERT_EQ(expected.size(), 6u);
    ASSERT_EQ(got.size(), 3u);
    EXPECT_LT(expected.back().at("loss"), expected.front().at("loss"));
    for (size_t i = 0; i < got.size(); ++i)
      for (const char* key : {"step", "loss", "grad_norm"})
        EXPECT_EQ(got[i].at(key), expected[i + 3].at(key)) << key << ", " << ranks << " ranks";
  }
}

TEST_P(Optimizers, CheckpointsLoadAtAnyRankCountBitForBit) {
  std::map<std::string, std::pair<size_t, uint64_t>> saved;
  std::mutex mutex;
  run_job(4, config("four", {"train.steps=3", "shard.zero1=2", "shard.zero2=2", "shard.zero3=1"}), false,
          [&](TrainingRun& run) {
            run.train(nullptr);
            auto state = dovetail::testing::state_digest(run.engine().state(), run.world());
            const std::lock_guard lock(mutex);
            saved = std::move(state);
          });
  ASSERT_FALSE(saved.empty());
  for (const int ranks : {1, 2, 4}) {
    const std::string name = "on" + std::to_string(ranks);
    copy_third_step("four", name);
    run_job(ranks, config(name), true, [&](TrainingRun& run) {
      EXPECT_EQ(run.engine().steps_done(), 3);
      EXPECT_EQ(saved, dovetail::testing::state_digest(run.engine().state(), run.world())) << ranks << " ranks";
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Optimizers,
                         ::testing::Values("adamw", "adam8", "sgd", "muon", "shampoo"),
                         [](const auto& info) { return info.param; });

using OptimizerConfigs = Optimizers;

TEST_P(OptimizerConfigs, ARuleGivesAParameterItsOptimizerAndTheRunSaysSo) {
  train_job(2, config("run", {"train.steps=3",
                              "optimizer.rules=[{pattern = \"*mlp*\", optimizer = \"sgd\", lr_scale = 0.5}]"}));
  const std::string text = read_text_file(at("run") + "/optimizer.txt");
  EXPECT_THAT(text, ::testing::ContainsRegex("model.layers.0.mlp.up_proj.weight +sgd +0.5"));
  EXPECT_THAT(text, ::testing::ContainsRegex("model.layers.0.self_attn.q_proj.weight +muon +1 "));
  EXPECT_THAT(text, ::testing::ContainsRegex("model.embed_tokens.weight +adamw +1 "));
  EXPECT_THAT(text, HasSubstr("units, imbalance"));
  EXPECT_THAT(message_of<ConfigError>(
                  [&] { config("x", {"optimizer.rules=[{pattern = \"*\", optimizer = \"adam\"}]"}); }),
              HasSubstr("optimizer.rules[0].optimizer"));
  const Config c = config("y", {"optimizer.rules=[{pattern = \"*mlp*\", optimizer = \"sgd\"}]"});
  EXPECT_EQ(to_toml(parse_config(to_toml(c), "again", {})), to_toml(c));
}

INSTANTIATE_TEST_SUITE_P(Muon, OptimizerConfigs, ::testing::Values("muon"));

}  // namespace
}  // namespace dovetail::trainer

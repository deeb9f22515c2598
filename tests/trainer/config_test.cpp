#include "dovetail/trainer/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dovetail/base/error.h"
#include "tests/trainer/temporary.h"

namespace dovetail::trainer {
namespace {

using ::testing::HasSubstr;

constexpr const char* kLeast = "[data]\nsources = [\"python-stdlib\"]\n";

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  return message_of<ConfigError>([&] { parse_config(kLeast + text, "x.toml", overrides); });
}

TEST(Config, ReadsEveryKindOfValue) {
  const Config c = parse_config(R"(
[run]
name = "try"
seed = 7
[model]
name = "llama"
dim = 64
tied = true
[data]
sources = ["a", "b"]
sequence = 32
shuffle = false
[optimizer]
lr = 1e-2
weight_decay = 0
rules = [{ pattern = "*norm*", lr_scale = 0.5 }, { pattern = "head", weight_decay = 0.0 }]
)",
                                "x.toml", {});
  EXPECT_EQ(c.run.name, "try");
  EXPECT_EQ(c.run.seed, 7);
  EXPECT_EQ(c.run_folder(), "runs/try");
  EXPECT_EQ(c.model, (nlohmann::json{{"name", "llama"}, {"dim", 64}, {"tied", true}}));
  EXPECT_EQ(c.data.sources, (std::vector<std::string>{"a", "b"}));
  EXPECT_FALSE(c.data.shuffle);
  EXPECT_EQ(c.optimizer.lr, 1e-2);
  EXPECT_EQ(c.optimizer.weight_decay, 0);  // an integer is a number
  ASSERT_EQ(c.optimizer.rules.size(), 2u);
  EXPECT_EQ(c.optimizer.rules[0].lr_scale, 0.5);
  EXPECT_FALSE(c.optimizer.rules[0].weight_decay.has_value());
  EXPECT_EQ(c.optimizer.rules[1].weight_decay, 0.0);
  EXPECT_EQ(c.train.steps, TrainConfig{}.steps);
}

TEST(Config, TextParsesBackToTheSameText) {
  Config c = parse_config(
      kLeast, "x.toml",
      {"run.name=a \"quoted\" name", "optimizer.lr=3e-4", "train.clip=0", "model.name=llama",
       "optimizer.rules=[{pattern='a*', lr_scale=2}]", "sample.prompt='tab\there\n'"});
  const std::string text = to_toml(c);
  const Config again = parse_config(text, "again.toml", {});
  EXPECT_EQ(to_toml(again), text);
  EXPECT_EQ(again.run.name, "a \"quoted\" name");
  EXPECT_EQ(again.optimizer.lr, 3e-4);
  EXPECT_EQ(again.sample.prompt, c.sample.prompt);
}

TEST(Config, OverridesWinInOrder) {
  const Config c =
      parse_config(std::string(kLeast) + "[train]\nsteps = 5\n", "x.toml",
                   {"train.steps=6", "train.steps=7", "shard.block=row", "data.suffixes=['.py']"});
  EXPECT_EQ(c.train.steps, 7);
  EXPECT_EQ(c.shard.block, "row");
  EXPECT_EQ(c.data.suffixes, std::vector<std::string>{".py"});
  EXPECT_THAT(error_of("", {"steps"}), HasSubstr("wanted KEY.PATH=VALUE, got 'steps'"));
}

TEST(Config, UnknownKeysNameTheNearestKnownOne) {
  EXPECT_EQ(error_of("[train]\nstep = 5\n"),
            "config: train.step: unknown key; did you mean steps?");
  EXPECT_EQ(error_of("[trian]\nsteps = 5\n"), "config: trian: unknown key; did you mean train?");
  EXPECT_EQ(error_of("[train]\nxyzzyquux = 5\n"), "config: train.xyzzyquux: unknown key");
  EXPECT_EQ(error_of("[optimizer]\nrules = [{ pattern = 'a', decay = 1 }]\n"),
            "config: optimizer.rules[0].decay: unknown key");
}

TEST(Config, WrongTypesSayWhatWasWantedAndGot) {
  EXPECT_EQ(error_of("[train]\nsteps = 'many'\n"),
            "config: train.steps: wanted an integer, got 'many'");
  EXPECT_EQ(error_of("[train]\nsteps = 1.5\n"), "config: train.steps: wanted an integer, got 1.5");
  EXPECT_EQ(error_of("[shard]\nrecompute = 1\n"),
            "config: shard.recompute: wanted true or false, got 1");
  EXPECT_THAT(error_of("[data.x]\n"), HasSubstr("config: data.x: unknown key"));
  EXPECT_EQ(error_of("", {"data.sources=[1]"}),
            "config: data.sources: wanted a list of strings, got [ 1 ]");
  EXPECT_EQ(message_of<ConfigError>([] { parse_config("data = 3\n", "x.toml", {}); }),
            "config: data: wanted a table, got 3");
}

TEST(Config, ImpossibleValuesAreRefused) {
  EXPECT_EQ(error_of("[train]\nsteps = 0\n"), "config: train.steps: wanted at least 1, got 0");
  EXPECT_EQ(error_of("[optimizer]\nlr = 0\n"),
            "config: optimizer.lr: wanted a number above 0, got 0");
  EXPECT_EQ(error_of("[optimizer]\nlr = nan\n"),
            "config: optimizer.lr: wanted a finite number, got nan");
  EXPECT_EQ(error_of("[optimizer]\nbeta1 = 1.5\n"),
            "config: optimizer.beta1: wanted a number of at least 0 and below 1, got 1.5");
  EXPECT_EQ(error_of("[shard]\nformat = 'fp8'\n"),
            "config: shard.format: wanted one of fp32, bf16, got 'fp8'");
  EXPECT_EQ(error_of("", {"train.steps=5", "optimizer.warmup_steps=6"}),
            "config: optimizer.warmup_steps: wanted at most train.steps = 5, got 6");
  EXPECT_THAT(message_of<ConfigError>([] { parse_config("", "x.toml", {}); }),
              HasSubstr("data.sources: wanted"));
}

TEST(Config, ValuesThatDoNotGoTogetherAreRefused) {
  EXPECT_EQ(error_of("[muon]\nmomentum = 1.0\n"),
            "config: muon.momentum: wanted a number of at least 0 and below 1, got 1.0");
  EXPECT_EQ(error_of("[optimizer]\nnesterov = true\n"),
            "config: optimizer.nesterov: wanted optimizer.momentum above 0 and optimizer.dampening 0 "
            "with it, got 0 and 0");
  EXPECT_EQ(error_of("[train]\nsteps = 5\n[optimizer]\nwarmup_steps = 5\n"),
            "config: optimizer.warmup_steps: wanted fewer than train.steps = 5 with schedule cosine, "
            "got 5");
  EXPECT_EQ(error_of("[shampoo]\nblock = 65536\n"),
            "config: shampoo.block: wanted a number from 1 to 32768, got 65536");
  EXPECT_EQ(error_of("[shard]\nmain = \"bf16\"\n"), "config: shard.main: wanted one of fp32, got 'bf16'");
}

TEST(Config, BrokenTomlNamesFileAndLine) {
  EXPECT_THAT(error_of("[train]\nsteps =\n"), HasSubstr("config: x.toml:4:"));
  EXPECT_THAT(message_of<FileError>([] { load_config("/nowhere/x.toml", {}); }),
              HasSubstr("/nowhere/x.toml"));
}

}  // namespace
}  // namespace dovetail::trainer

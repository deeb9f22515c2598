#include "dovetail/update/rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

const std::vector<TensorSpec> kTensors = {
    {.name = "embed.weight", .shape = {10, 4}, .kind = ParamKind::embedding},
    {.name = "layers.0.attn.weight", .shape = {4, 4}, .kind = ParamKind::matrix},
    {.name = "layers.0.norm.weight", .shape = {4}, .kind = ParamKind::vector},
    {.name = "layers.1.attn.weight", .shape = {4, 4}, .kind = ParamKind::matrix},
};

TEST(Rules, Patterns) {
  EXPECT_TRUE(matches("", ""));
  EXPECT_TRUE(matches("*", ""));
  EXPECT_TRUE(matches("a*", "a"));
  EXPECT_TRUE(matches("**b", "aab"));
  EXPECT_TRUE(matches("a*b*c", "a.b.b.xc"));
  EXPECT_TRUE(matches("*.bias", "x.bias.bias"));
  EXPECT_FALSE(matches("*.bias", "x.bias.weight"));
  EXPECT_FALSE(matches("a", "ab"));
  EXPECT_FALSE(matches("", "a"));
  EXPECT_FALSE(matches("a*b", "a"));
  EXPECT_FALSE(matches("a.c", "abc"));                          // a dot is a dot
  EXPECT_FALSE(matches("a?c", "abc"));                          // and a question mark itself
  EXPECT_FALSE(matches("*a*a*a*a*b", std::string(2000, 'a')));  // in bearable time
}

TEST(Rules, FirstMatchHolds) {
  const ParameterRules rules(
      {.weight_decay = 0.1,
       .rules = {{"layers.1.*", 0.5, 0.3}, {"layers.*.weight", 2, {}}, {"layers.*", 9, 9}}});
  EXPECT_EQ(rules.factors(kTensors[0]).rule, -1);
  EXPECT_EQ(rules.factors(kTensors[0]).weight_decay, 0.1);
  EXPECT_EQ(rules.factors(kTensors[0]).lr_scale, 1);
  EXPECT_EQ(rules.factors(kTensors[3]).rule, 0);
  EXPECT_EQ(rules.factors(kTensors[3]).lr_scale, 0.5);
  EXPECT_EQ(rules.factors(kTensors[3]).weight_decay, 0.3);
  EXPECT_EQ(rules.factors(kTensors[1]).rule, 1);
  EXPECT_EQ(rules.factors(kTensors[1]).weight_decay, 0.1);
}

TEST(Rules, VectorsDoNotDecayUnlessTold) {
  EXPECT_EQ(ParameterRules({.weight_decay = 0.1}).factors(kTensors[2]).weight_decay, 0);
  EXPECT_EQ(ParameterRules({.weight_decay = 0.1, .decay_vectors = true})
                .factors(kTensors[2])
                .weight_decay,
            0.1);
  // A rule for the learning rate alone leaves that default; one with a decay has the last word.
  EXPECT_EQ(ParameterRules({.weight_decay = 0.1, .rules = {{"*norm*", 2, {}}}})
                .factors(kTensors[2])
                .weight_decay,
            0);
  EXPECT_EQ(ParameterRules({.weight_decay = 0.1, .rules = {{"*norm*", 1, 0.2}}})
                .factors(kTensors[2])
                .weight_decay,
            0.2);
}

TEST(Rules, TableSaysWhoUsesWhat) {
  const std::string table =
      ParameterRules({.weight_decay = 0.1, .rules = {{"embed*", 0.25, 0.0}}}).table(kTensors);
  EXPECT_THAT(table, testing::ContainsRegex("embed.weight +0.25 +0 +0 \\(\"embed\\*\"\\)\n"));
  EXPECT_THAT(table, testing::ContainsRegex("layers.0.attn.weight +1 +0.1 +default\n"));
  EXPECT_THAT(table, testing::ContainsRegex("layers.0.norm.weight +1 +0 +default\n"));
}

TEST(Rules, RefusesBadOnes) {
  EXPECT_THROW(ParameterRules({.weight_decay = -1}), ConfigError);
  EXPECT_THROW(ParameterRules({.rules = {{"a", -1, {}}}}), ConfigError);
  EXPECT_THROW(ParameterRules({.rules = {{"a", NAN, {}}}}), ConfigError);
  EXPECT_THROW(ParameterRules({.rules = {{"a", 1, INFINITY}}}), ConfigError);
  EXPECT_THROW(ParameterRules({.rules = {{"", 1, {}}}}), ConfigError);
}

TEST(Rules, ARuleThatMatchesNothingIsAnError) {
  EXPECT_NO_THROW(
      ParameterRules({.rules = {{"layers.*", 1, {}}, {"*norm*", 1, {}}}}).check_used(kTensors));
  try {
    ParameterRules({.rules = {{"embed*", 1, {}}, {"layer.*", 1, {}}}}).check_used(kTensors);
    FAIL();
  } catch (const ConfigError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("parameter rule 1 (\"layer.*\")"));
  }
}

TEST(Rules, DescriptionTellsDifferentRulesApart) {
  const auto text = [](RuleOptions o) { return ParameterRules(std::move(o)).describe(); };
  EXPECT_EQ(text({.weight_decay = 0.1}), text({.weight_decay = 0.1}));
  EXPECT_NE(text({.weight_decay = 0.1}), text({.weight_decay = 0.1 + 1e-15}));
  EXPECT_NE(text({.rules = {{"a", 1, 0.0}}}), text({.rules = {{"a", 1, {}}}}));
}

}  // namespace
}  // namespace dovetail

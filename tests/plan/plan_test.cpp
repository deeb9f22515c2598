#include "dovetail/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>

#include "dovetail/base/error.h"
#include "dovetail/plan/bytes.h"
#include "tests/plan/random_plan.h"

namespace dovetail::plan {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<GroupSpec> small_model() {
  return {{"embed", {{"embed.weight", {50, 8}, ParamKind::embedding}}, false},
          {"layers.0",
           {{"layers.0.q", {8, 8}, ParamKind::matrix, 2, 0},
            {"layers.0.o", {8, 8}, ParamKind::matrix, 2, 1},
            {"layers.0.norm", {8}, ParamKind::vector}}},
          {"layers.1",
           {{"layers.1.q", {8, 8}, ParamKind::matrix, 2, 0},
            {"layers.1.scale", {}, ParamKind::vector}}},
          {"", {{"norm", {8}, ParamKind::vector}, {"none", {0, 8}, ParamKind::matrix}}}};
}

PlanOptions small_options() {
  PlanOptions o;
  o.world = 4;
  o.degrees = {4, 2, 2};
  o.alignment = 8;
  return o;
}

void check_plan_formats(const Plan& plan, const std::vector<std::string>& wanted) {
  ASSERT_EQ(plan.groups.size(), wanted.size());
  for (size_t g = 0; g < wanted.size(); ++g) EXPECT_EQ(plan.groups[g].buckets[0].format, wanted[g]) << g;
}

std::vector<bool> kept(const Plan& plan) {
  std::vector<bool> flags;
  for (const GroupPlan& g : plan.groups) flags.push_back(g.keep_after_forward);
  return flags;
}

// Every tensor is placed exactly once, in its own group, with its size; every layout is legal.
void check_plan(const Plan& plan, const std::vector<GroupSpec>& specs) {
  ASSERT_EQ(plan.groups.size(), specs.size());
  int64_t first = 0;
  for (size_t g = 0; g < specs.size(); ++g) {
    ASSERT_EQ(plan.groups[g].name, specs[g].name);
    ASSERT_EQ(plan.groups[g].buckets.size(), 1u);
    ASSERT_EQ(plan.groups[g].buckets[0].format, plan.options.format);
    ASSERT_LE(std::ssize(plan.groups[g].buckets[0].segments), plan.options.segments);
    std::vector<int64_t> placed;
    for (const SegmentLayout& s : plan.groups[g].buckets[0].segments) {
      verify(s);
      ASSERT_EQ((Degrees{s.zero1, s.zero2, s.zero3}), plan.options.degrees);
      for (const Placement& p : s.placements) {
        placed.push_back(p.tensor);
        const TensorSpec& t = plan.tensors.at(p.tensor);
        ASSERT_EQ(p.numel, t.numel());
        ASSERT_EQ(p.block, block_elements(t, plan.options.block));
        ASSERT_EQ(p.offset % plan.options.alignment, 0);
      }
    }
    std::sort(placed.begin(), placed.end());
    ASSERT_EQ(std::ssize(placed), std::ssize(specs[g].tensors));
    for (size_t t = 0; t < placed.size(); ++t) {
      ASSERT_EQ(placed[t], first + static_cast<int64_t>(t));
      ASSERT_EQ(plan.tensors[placed[t]], specs[g].tensors[t]);
    }
    first += std::ssize(placed);
  }
  ASSERT_EQ(first, std::ssize(plan.tensors));
}

TEST(Plan, ElementBlocksLieInOrder) {
  const Plan plan = make_plan(small_options(), small_model());
  check_plan(plan, small_model());
  const SegmentLayout& s = plan.groups[1].buckets[0].segments[0];
  EXPECT_THAT(s.placements, ElementsAre(Placement{1, 0, 64, 1}, Placement{2, 64, 64, 1},
                                        Placement{3, 128, 8, 1}));
  // 17 units of 8 over two: 9 each, then 5 and 4.
  EXPECT_EQ(s.shard3, 72);
  EXPECT_EQ(s.shard2, 72);
  EXPECT_EQ(s.shard1, 40);
  EXPECT_EQ(s.bound, 72);
  EXPECT_EQ(s.zero1_interval(1), (Interval{40, 72}));
}

TEST(Plan, GroupsWithoutTensorsAndTensorsWithoutElements) {
  std::vector<GroupSpec> model{{"a", {}}, {"b", {{"b.none", {0, 3}, ParamKind::matrix}}}, {"", {}}};
  for (BlockKind block : {BlockKind::element, BlockKind::row, BlockKind::matrix}) {
    PlanOptions o = small_options();
    o.block = block;
    const Plan plan = make_plan(o, model);
    check_plan(plan, model);
    EXPECT_THAT(plan.groups[0].buckets[0].segments, IsEmpty());
    ASSERT_EQ(plan.groups[1].buckets[0].segments.size(), 1u);
    EXPECT_EQ(plan.groups[1].buckets[0].segments[0].size(), 0);
    EXPECT_EQ(parse_plan(to_text(plan)), plan);
  }
  EXPECT_EQ(parse_plan(to_text(make_plan(small_options(), {}))).groups.size(), 0u);
}

TEST(Plan, WhatStaysGathered) {
  PlanOptions o = small_options();
  EXPECT_THAT(kept(make_plan(o, small_model())), ElementsAre(false, false, true, true));
  std::vector<GroupSpec> rootless = small_model();
  rootless.pop_back();
  EXPECT_THAT(kept(make_plan(o, rootless)), ElementsAre(false, false, true));
  o.reshard_after_forward = false;
  EXPECT_THAT(kept(make_plan(o, small_model())), ElementsAre(true, true, true, true));
  o = small_options();
  o.degrees = {4, 4, 1};
  EXPECT_THAT(kept(make_plan(o, small_model())), ElementsAre(true, true, true, true));
  EXPECT_THAT(kept(make_plan(small_options(), {{"", {}}})), ElementsAre(true));
  std::vector<GroupSpec> told = small_model();
  told[1].keep_after_forward = true;
  told[2].keep_after_forward = false;
  told[3].keep_after_forward = false;
  EXPECT_THAT(kept(make_plan(small_options(), told)), ElementsAre(false, true, false, false));
  EXPECT_THAT(kept(make_plan(o, told)), ElementsAre(true, true, true, true));  // zero3 == 1: nothing is released
}

TEST(Plan, FormatsOfGroups) {
  std::vector<GroupSpec> model = small_model();
  model[1].format = "bf16";
  const Plan plan = make_plan(small_options(), model);
  check_plan_formats(plan, {"fp32", "bf16", "fp32", "fp32"});
  EXPECT_EQ(parse_plan(to_text(plan)), plan);
  const Plan one_format = make_plan(small_options(), small_model());
  EXPECT_EQ(plan.groups[1].buckets[0].segments, one_format.groups[1].buckets[0].segments);
  // Half the bytes travel for that group alone.
  const SentBytes mixed = sent_bytes(plan, 0, {});
  const SentBytes single = sent_bytes(make_plan(small_options(), small_model()), 0, {});
  EXPECT_EQ(single.gather_forward - mixed.gather_forward, 2 * plan.groups[1].buckets[0].segments[0].shard3);
  model[1].format = "fp7";
  EXPECT_THAT([&] { make_plan(small_options(), model); }, ThrowsMessage<ConfigError>(HasSubstr("fp7")));
}

TEST(Plan, BadInputIsNamed) {
  const auto error = [](auto change) -> std::string {
    PlanOptions o = small_options();
    std::vector<GroupSpec> model = small_model();
    change(o, model);
    try {
      make_plan(o, model);
    } catch (const ConfigError& e) {
      return e.what();
    }
    return "no error";
  };
  using Options = PlanOptions&;
  using Model = std::vector<GroupSpec>&;
  EXPECT_EQ(error([](Options, Model) {}), "no error");
  EXPECT_THAT(error([](Options, Model m) { m[2].tensors[0].name = "layers.0.q"; }),
              HasSubstr("layers.0.q: a tensor of this name is in the plan already (again in group "
                        "\"layers.1\")"));
  EXPECT_THAT(error([](Options, Model m) { m[2].name = "layers.0"; }),
              HasSubstr("two are named \"layers.0\""));
  EXPECT_THAT(error([](Options, Model m) { std::swap(m[0], m[3]); }),
              HasSubstr("root group last, got it as number 0"));
  EXPECT_THAT(error([](Options, Model m) { m[0].tensors[0].name = ""; }),
              HasSubstr("wanted a name"));
  EXPECT_THAT(error([](Options, Model m) { m[0].tensors[0].shape = {-1, 8}; }),
              HasSubstr("embed.weight: wanted sizes"));
  EXPECT_THAT(error([](Options, Model m) {
                m[0].tensors[0].shape = {0, int64_t{1} << 40, int64_t{1} << 40};
              }),
              HasSubstr("embed.weight: wanted at most"));
  EXPECT_THAT(error([](Options, Model m) { m[0].tensors[0].heads = -1; }),
              HasSubstr("embed.weight: wanted heads"));
  EXPECT_THAT(error([](Options o, Model) { o.world = 6; }), HasSubstr("zero1 4, world 6"));
  EXPECT_THAT(error([](Options o, Model) { o.format = "fp64"; }), HasSubstr("fp64"));
  EXPECT_THAT(error([](Options o, Model) { o.main = DType::u8; }),
              HasSubstr("main: wanted fp32 or bf16, got u8"));
  EXPECT_THAT(error([](Options o, Model) { o.alignment = 0; }), HasSubstr("alignment"));
  EXPECT_THAT(error([](Options o, Model) { o.segments = 4; }),
              HasSubstr("segments: wanted 1, 2 or 3, got 4"));
  EXPECT_THAT(error([](Options o, Model) { o.prefetch = -1; }), HasSubstr("prefetch"));
  EXPECT_THAT(error([](Options o, Model) { o.pending_reductions = -2; }),
              HasSubstr("pending_reductions"));
}

TEST(Plan, TextShowsOneFactALine) {
  EXPECT_THAT(
      to_text(make_plan(small_options(), small_model())),
      testing::StartsWith("dovetail-plan 1\nworld 4\ndegrees 4 2 2\nmain fp32\nformat fp32\nblock "
                          "element\nboundary block\n"
                          "alignment 8\nsegments 1\nreshard_after_forward true\nprefetch 1\n"
                          "pending_reductions 1\nlocal_accumulation false\nhost_ranks 1\ntensors 8\ngroups 4\n"
                          "tensor 0 \"embed.weight\" embedding [50,8] heads 0 along 0\n"
                          "tensor 1 \"layers.0.q\" matrix [8,8] heads 2 along 0\n"));
}

TEST(Plan, RandomPlansAreLegalAndComeBackFromText) {
  RandomPlans random(11);
  for (int round = 0; round < 300; ++round) {
    const PlanOptions options = random.options();
    const std::vector<GroupSpec> model = random.groups();
    const Plan plan = make_plan(options, model);
    check_plan(plan, model);
    const std::string text = to_text(plan);
    ASSERT_EQ(parse_plan(text), plan) << text;
    ASSERT_EQ(to_text(parse_plan(text)), text);
    ASSERT_EQ(make_plan(options, model), plan) << "planning is a function";
    if (HasFatalFailure()) return;
  }
}

// Where 8-bit blocks and random bits lie follows from the model alone.
TEST(Plan, BlocksAndNumbersDoNotDependOnDegrees) {
  RandomPlans random(5);
  for (int round = 0; round < 40; ++round) {
    PlanOptions options = random.options();
    const std::vector<GroupSpec> model = random.groups();
    std::vector<std::pair<int64_t, int64_t>> reference;  // block and numel by tensor number
    std::vector<TensorSpec> tensors;
    bool first = true;
    for (int64_t world : {1, 4, 6}) {
      options.world = world;
      for (const Degrees& d : legal_chains(world)) {
        options.degrees = d;
        const Plan plan = make_plan(options, model);
        std::vector<std::pair<int64_t, int64_t>> found(plan.tensors.size());
        for (const GroupPlan& g : plan.groups)
          for (const BucketPlan& b : g.buckets)
            for (const SegmentLayout& s : b.segments)
              for (const Placement& p : s.placements) found[p.tensor] = {p.block, p.numel};
        if (first) reference = found, tensors = plan.tensors, first = false;
        ASSERT_EQ(found, reference) << to_text(d);
        ASSERT_EQ(plan.tensors, tensors);
      }
    }
  }
}

std::string parse_error(const std::string& text) {
  try {
    parse_plan(text);
  } catch (const PlanError& e) {
    return e.what();
  }
  return "no error";
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size(); at = text.find('\n', at) + 1)
    lines.push_back(text.substr(at, text.find('\n', at) - at));
  return lines;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

TEST(PlanText, EveryDamagedLineIsAnErrorWithItsNumber) {
  PlanOptions options = small_options();
  options.block = BlockKind::row;
  options.segments = 2;
  const std::vector<std::string> good = lines_of(to_text(make_plan(options, small_model())));
  ASSERT_EQ(parse_error(joined(good)), "no error");
  for (size_t line = 0; line < good.size(); ++line) {
    const auto expect_error = [&](std::string damaged) {
      std::vector<std::string> lines = good;
      lines[line] = std::move(damaged);
      EXPECT_THAT(parse_error(joined(lines)),
                  HasSubstr("plan, line " + std::to_string(line + 1) + ":"))
          << lines[line];
    };
    expect_error(good[line] + " 1");
    expect_error(good[line] + " ");
    expect_error(" " + good[line]);
    expect_error("");
    expect_error("x" + good[line]);
    expect_error(good[line] + "x");
    if (good[line] != "end") expect_error(good[line].substr(0, good[line].rfind(' ')));
  }
}

TEST(PlanText, MissingAndRepeatedLinesAreErrors) {
  const std::vector<std::string> good =
      lines_of(to_text(make_plan(small_options(), small_model())));
  for (size_t line = 0; line < good.size(); ++line) {
    std::vector<std::string> lines = good;
    lines.erase(lines.begin() + line);
    EXPECT_THAT(parse_error(joined(lines)), HasSubstr("plan, line ")) << "without: " << good[line];
    lines = good;
    lines.insert(lines.begin() + line, good[line]);
    EXPECT_THAT(parse_error(joined(lines)), HasSubstr("plan, line ")) << "twice: " << good[line];
    lines.assign(good.begin(), good.begin() + line);
    EXPECT_THAT(parse_error(joined(lines)), HasSubstr("the end of the text")) << line;
  }
  EXPECT_THAT(parse_error(joined(good) + "more\n"), HasSubstr("wanted nothing after \"end\""));
  EXPECT_THAT(parse_error(""), HasSubstr("plan, line 1: wanted \"dovetail-plan\""));
}

TEST(PlanText, PlansThatCannotBeAreRefused) {
  const std::string good = to_text(make_plan(small_options(), small_model()));
  const auto change = [&](std::string_view from, std::string_view to) {
    std::string text = good;
    const size_t at = text.find(from);
    if (at == std::string::npos) return "not found: " + std::string(from);
    return parse_error(text.replace(at, from.size(), to));
  };
  EXPECT_THAT(change("dovetail-plan 1", "dovetail-plan 2"),
              HasSubstr("line 1: wanted a number from 1 to 1, got 2"));
  EXPECT_THAT(change("degrees 4 2 2", "degrees 4 2 4"),
              HasSubstr("line 3: degrees: wanted zero3 | zero2"));
  EXPECT_THAT(change("main fp32", "main i64"), HasSubstr("main: wanted fp32 or bf16, got i64"));
  EXPECT_THAT(change("shards 40 72 72", "shards 40 72 73"),
              HasSubstr("do not make a zero3 shard of 73"));
  EXPECT_THAT(change("place 2 at 64", "place 2 at 60"), HasSubstr("tensor 2 starts at 60"));
  EXPECT_THAT(change("place 2 at 64", "place 1 at 64"), HasSubstr("tensor 1 is placed twice"));
  EXPECT_THAT(change("place 2 at 64", "place 99 at 64"), HasSubstr("from 0 to 7, got 99"));
  EXPECT_THAT(change("elements 400", "elements 399"), HasSubstr("from 400 to 400, got 399"));
  EXPECT_THAT(change("bucket fp32", "bucket fp16"), HasSubstr("fp16"));
  EXPECT_THAT(change("group 1 ", "group 2 "), HasSubstr("wanted a number from 1 to 1, got 2"));
  EXPECT_THAT(change("tensors 8\n", "tensors 9223372036854775807\n"),
              HasSubstr("wanted \"tensor\", got \"group\""));
}

// The example of docs/notation.md, without the remarks on the right.
TEST(PlanText, TheDocumentedExampleIsWhatIsPrinted) {
  std::ifstream in(std::string(DOVETAIL_SOURCE_DIR) + "/docs/notation.md");
  std::string documented;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    inside = inside || line.starts_with("    dovetail-plan");
    if (!inside) continue;
    line.erase(0, 4);
    documented += line.substr(0, line.find("   ")) + "\n";
    while (documented.ends_with(" \n")) documented.erase(documented.size() - 2, 1);
    if (line == "end") break;
  }
  PlanOptions options;
  options.world = 4;
  options.degrees = {4, 2, 2};
  options.format = "bf16";
  options.block = BlockKind::row;
  const std::vector<GroupSpec> model{{"layers.0",
                                      {{"layers.0.wq", {64, 64}, ParamKind::matrix, 4, 0},
                                       {"layers.0.norm", {64}, ParamKind::vector}}}};
  EXPECT_EQ(documented, to_text(make_plan(options, model)));
}

TEST(PlanText, HashesAndDifferencesFollowTheText) {
  const Plan a = make_plan(small_options(), small_model());
  PlanOptions options = small_options();
  options.prefetch = 2;
  const Plan b = make_plan(options, small_model());
  EXPECT_EQ(hash_of(a), hash_of(make_plan(small_options(), small_model())));
  EXPECT_NE(hash_of(a), hash_of(b));
  EXPECT_EQ(first_difference(to_text(a), to_text(b)),
            "line 11: \"prefetch 1\" against \"prefetch 2\"");
  EXPECT_EQ(first_difference(to_text(a), to_text(a)), "");
  EXPECT_EQ(first_difference("x\ny\n", "x\n"), "line 2: \"y\" against the end of the text");
  EXPECT_EQ(first_difference("x\n", "x\n\n"), "line 2: the end of the text against \"\"");
  EXPECT_EQ(first_difference("x\ny", "x\ny\n"), "line 2: one text lacks its last line end");
}

}  // namespace
}  // namespace dovetail::plan

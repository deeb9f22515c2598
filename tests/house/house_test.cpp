// The rules of the house, checked over all sources: layers, line lengths, file lengths, and no state of its own below
// the trainer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/house/sources.h"

namespace dovetail::house {
namespace {

using testing::IsEmpty;
using testing::Not;

constexpr int kMostColumns = 120, kMostLines = 450;

Layers layers() { return parse_layers(read_file(std::string(DOVETAIL_SOURCE_DIR) + "/dovetail/CMakeLists.txt")); }

std::string at(const SourceFile& file, size_t line) {
  return file.path.string() + ":" + std::to_string(line + 1) + ": ";
}

std::vector<SourceFile> all_sources() {
  std::vector<SourceFile> all;
  for (const char* folder : {"dovetail", "apps", "tests", "benchmarks", "examples"})
    for (SourceFile& file : sources_below(folder)) all.push_back(std::move(file));
  return all;
}

TEST(House, LayersStandAboveWhatTheyUse) {
  const Layers all = layers();
  ASSERT_TRUE(all.contains("base") && all.contains("trainer"));
  for (const auto& [name, layer] : all) {
    for (const std::string& dep : layer.deps) {
      ASSERT_TRUE(all.contains(dep)) << name << " needs " << dep;
      EXPECT_LT(all.at(dep).order, layer.order) << name << " needs " << dep << ", which stands above it";
      EXPECT_TRUE(layer.torch || !all.at(dep).torch) << name << " is free of torch but needs " << dep;
    }
  }
  for (const char* name : {"base", "layout", "plan", "numerics"}) EXPECT_FALSE(all.at(name).torch) << name;
}

TEST(House, NoUpwardInclude) {
  const Layers all = layers();
  const std::vector<SourceFile> files = sources_below("dovetail");
  ASSERT_GT(files.size(), 50u) << "the scan found too little to mean anything";
  for (const SourceFile& file : files) {
    ASSERT_TRUE(all.contains(file.layer())) << file.path << " lies in no layer";
    for (size_t line = 0; line < file.lines.size(); ++line) {
      const std::string included = included_by(file.lines[line]);
      const std::string complaint = included.empty() ? "" : include_complaint(all, file.layer(), included);
      EXPECT_THAT(complaint, IsEmpty()) << at(file, line) << included;
      const std::filesystem::path root = DOVETAIL_SOURCE_DIR;
      EXPECT_TRUE(!included.starts_with("dovetail/") || std::filesystem::exists(root / included))
          << at(file, line) << "no such file: " << included;
    }
  }
}

TEST(House, NoStateOfItsOwnBelowTheTrainer) {
  for (const SourceFile& file : sources_below("dovetail")) {
    if (file.layer() == "trainer") continue;
    const std::vector<std::string> code = code_of(file.lines);
    for (size_t line = 0; line < code.size(); ++line)
      EXPECT_THAT(state_complaint(code[line]), IsEmpty()) << at(file, line) << file.lines[line];
  }
}

TEST(House, FilesAndLinesAreShort) {
  std::string too_long;
  for (const SourceFile& file : all_sources()) {
    if (std::ssize(file.lines) > kMostLines)
      too_long += file.path.string() + ": " + std::to_string(file.lines.size()) + " lines\n";
    for (size_t line = 0; line < file.lines.size(); ++line)
      if (const int n = columns(file.lines[line]); n > kMostColumns)
        too_long += at(file, line) + std::to_string(n) + " columns\n";
  }
  EXPECT_TRUE(too_long.empty()) << "wanted at most " << kMostLines << " lines of " << kMostColumns << " columns; got\n"
                                << too_long;
}

// The scans themselves: they find what they are for and leave alone what they should.

TEST(HouseScan, ReadsLayers) {
  const Layers all = parse_layers(
      "# dt_layer(old DEPS x)\ndt_layer(base)\ndt_layer(plan DEPS base LINK json::json)\n"
      "dt_layer(comm TORCH OPTIMIZE DEPS plan\n   base)\n");
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all.at("plan").deps, std::set<std::string>{"base"});
  EXPECT_FALSE(all.at("plan").torch);
  EXPECT_EQ(all.at("comm").deps, (std::set<std::string>{"base", "plan"}));
  EXPECT_TRUE(all.at("comm").torch);
  EXPECT_LT(all.at("plan").order, all.at("comm").order);
}

TEST(HouseScan, FindsIncludesThatGoUp) {
  const Layers all = parse_layers("dt_layer(base)\ndt_layer(plan DEPS base)\ndt_layer(comm TORCH DEPS base)\n");
  const auto complaint = [&](const std::string& layer, const std::string& line) {
    return include_complaint(all, layer, included_by(line));
  };
  EXPECT_THAT(complaint("plan", "#include \"dovetail/base/error.h\""), IsEmpty());
  EXPECT_THAT(complaint("plan", "#include \"dovetail/plan/plan.h\""), IsEmpty());
  EXPECT_THAT(complaint("plan", "#include <vector>"), IsEmpty());
  EXPECT_THAT(complaint("comm", "#include <ATen/core/Tensor.h>"), IsEmpty());
  EXPECT_THAT(complaint("base", "#include \"dovetail/plan/plan.h\""), Not(IsEmpty()));
  EXPECT_THAT(complaint("plan", "  # include \"dovetail/comm/group.h\"  // why"), Not(IsEmpty()));
  EXPECT_THAT(complaint("plan", "#include \"dovetail/nowhere/x.h\""), Not(IsEmpty()));
  for (const char* header : {"torch/torch.h", "ATen/ATen.h", "c10/util/Half.h", "caffe2/x.h"})
    EXPECT_THAT(complaint("plan", std::string("#include <") + header + ">"), Not(IsEmpty())) << header;
  EXPECT_EQ(included_by("// says #include \"dovetail/base/error.h\" in passing"), "");
}

TEST(HouseScan, FindsState) {
  for (const char* bad :
       {"  const char* home = std::getenv(\"\");", "setenv(\"\", \"\", 1);", "  exit(1);", "  std::exit(1);",
        "  if (x) _exit(2);", "thread_local int depth = 0;", "  static int calls = 0;", "static std::mutex lock;",
        "  static std::map<int, std::string> names;", "  static std::vector<int> seen{};", "int counter = 0;",
        "std::mutex lock;", "std::map<int, std::string> registry;", "inline int level = 1;", "std::atomic<int> n{0};",
        "char buffer[64];", "  inline static int made = 0;", "Engine* current;"})
    EXPECT_THAT(state_complaint(bad), Not(IsEmpty())) << bad;
  for (const char* good :
       {"  int counter = 0;", "constexpr int kMost = 3;", "const std::regex word(\"\");", "  static const int kA = 1;",
        "  static constexpr int kA = 1;", "static int helper(int a);", "  static Engine make(Options o = {});",
        "using Names = std::vector<int>;", "struct Options;", "extern template class X;", "  return exit_code;",
        "  policy.exit(3);", "namespace dovetail {", "int64_t total() const;", "  std::lock_guard hold(lock_);",
        "enum class Kind : uint8_t { a, b };", "}  ", "  worker->exit();",
        "concept c = requires(T& t) { f(t); };"})
    EXPECT_THAT(state_complaint(good), IsEmpty()) << good;
}

TEST(HouseScan, SeesCodeOnly) {
  const std::vector<std::string> code =
      code_of({"int a; // exit(1)", "f(\"getenv(\\\"x\\\")\", 'x');", "/* static int a;", "exit(1); */ int b;",
               "1'000'000"});
  EXPECT_THAT(code, testing::ElementsAre("int a; ", "f(\"\", '');", "", " int b;", "1'000'000"));
  EXPECT_EQ(columns("a\xc3\xa4z"), 3);
}

}  // namespace
}  // namespace dovetail::house

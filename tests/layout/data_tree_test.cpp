#include "dovetail/layout/data_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A fused QKV weight [12, 4] in bf16 (four query heads, one key, one value head of two rows) and an output projection
// [4, 8] behind it, whose four heads are pairs of columns.
struct Attention {
  DataTree tree{"block.0", 96 + 64};
  int64_t qkv = tree.add_contiguous(0, "qkv", 0, {12, 4}, DType::bf16);
  int64_t q = tree.add_contiguous(qkv, "q", 0, {8, 4}, DType::bf16);
  int64_t tiles = tree.add_contiguous(qkv, "tiles", 0, {3, 4, 4}, DType::bf16);
  int64_t out = tree.add_contiguous(0, "out", 96, {4, 8}, DType::bf16);
  Attention() {
    for (int h = 0; h < 4; ++h) tree.add_contiguous(q, "head." + std::to_string(h), h * 16, {2, 4}, DType::bf16);
    tree.add_contiguous(qkv, "k", 64, {2, 4}, DType::bf16);
    tree.add_contiguous(qkv, "v", 80, {2, 4}, DType::bf16);
    for (int h = 0; h < 4; ++h)
      tree.add(out, {"head." + std::to_string(h), 96 + h * 4, {4, 2}, {8, 1}, DType::bf16, -1});
  }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const PlanError& e) {
    return e.what();
  }
  return "no error";
}

TEST(DataTree, HeadsOfAFusedWeightAreRunsOfItsBytes) {
  const Attention a;
  const int64_t head3 = a.tree.find("qkv/q/head.3");
  ASSERT_GE(head3, 0);
  EXPECT_EQ(a.tree.path(head3), "qkv/q/head.3");
  EXPECT_EQ(a.tree.extent(head3), (Interval{48, 64}));
  EXPECT_THAT(a.tree.runs(head3), ElementsAre(Interval{48, 64}));
  EXPECT_THAT(a.tree.runs(a.tree.find("qkv/v")), ElementsAre(Interval{80, 96}));
  EXPECT_EQ(a.tree.find("qkv/q/head.4"), -1);
  EXPECT_EQ(a.tree.find("q"), -1);
  EXPECT_EQ(a.tree.find(""), 0);
  EXPECT_EQ(a.tree.children(a.qkv).size(), 4u);
}

TEST(DataTree, HeadsOfAnOutputProjectionAreColumns) {
  const Attention a;
  const int64_t head1 = a.tree.find("out/head.1");
  EXPECT_EQ(a.tree.extent(head1), (Interval{100, 152}));
  EXPECT_THAT(a.tree.runs(head1),
              ElementsAre(Interval{100, 104}, Interval{116, 120}, Interval{132, 136}, Interval{148, 152}));
  IntervalList all;
  for (int64_t head : a.tree.children(a.out))
    for (Interval run : a.tree.runs(head)) all.push_back(run);
  std::sort(all.begin(), all.end());
  int64_t at = 96;
  for (Interval run : all) {
    EXPECT_EQ(run.begin, at);
    at = run.end;
  }
  EXPECT_EQ(at, 160);
}

TEST(DataTree, SiblingsMayReadTheSameBytes) {
  const Attention a;
  const Interval q = a.tree.extent(a.q), tiles = a.tree.extent(a.tiles);
  EXPECT_EQ(intersect(q, tiles), (Interval{0, 64}));
  EXPECT_EQ(a.tree.extent(a.tiles), a.tree.extent(a.qkv));
}

TEST(DataTree, BoundsAndNames) {
  Attention a;
  DataTree& t = a.tree;
  const auto add = [&](int64_t parent, DataNode n) { return error_of([&] { t.add(parent, n); }); };
  EXPECT_THAT(add(a.q, {"x", 48, {3, 4}, {4, 1}, DType::bf16}),
              HasSubstr("qkv/q/x: 24 bytes from 48 on reach outside"));
  EXPECT_THAT(add(a.out, {"x", 94, {2}, {1}, DType::bf16}), HasSubstr("out/x: 4 bytes from 94"));
  EXPECT_THAT(add(a.q, {"x", 0, {2, 2}, {31, 1}, DType::bf16}), HasSubstr("66 bytes from 0"));
  EXPECT_THAT(add(0, {"x", 2, {2}, {1}, DType::f32}), HasSubstr("offset 2 is no multiple of the 4 bytes of fp32"));
  EXPECT_THAT(add(a.q, {"head.0", 0, {1}, {1}, DType::bf16}), HasSubstr("qkv/q/head.0 is there already"));
  EXPECT_THAT(add(0, {"a/b", 0, {1}, {1}, DType::bf16}), HasSubstr("without '/'"));
  EXPECT_THAT(add(0, {"", 0, {1}, {1}, DType::bf16}), HasSubstr("without '/'"));
  EXPECT_THAT(add(0, {"x", 0, {1, 2}, {1}, DType::bf16}), HasSubstr("2 dimensions but 1 strides"));
  EXPECT_THAT(add(0, {"x", 0, {-1}, {1}, DType::bf16}), HasSubstr("at least 0, got [-1]"));
  EXPECT_THAT(add(0, {"x", 8, {2}, {-1}, DType::bf16}), HasSubstr("at least 0, got [2] and [-1]"));
  EXPECT_THAT(add(99, {"x", 0, {1}, {1}, DType::bf16}), HasSubstr("no parent 99"));
  EXPECT_THAT(add(0, {"x", 0, {2, 2}, {int64_t{1} << 62, 1}, DType::f32}), HasSubstr("reach outside"));
  EXPECT_THAT(add(0, {"x", 0, {int64_t{1} << 40, int64_t{1} << 40}, {0, 0}, DType::f32}), HasSubstr("at least 0"));
  EXPECT_THAT(error_of([&] { t.add_contiguous(0, "x", 0, {3, int64_t{1} << 62, 4}, DType::u8); }),
              HasSubstr("too large"));
  EXPECT_THAT(error_of([] { DataTree("x", -1); }), HasSubstr("at least 0 bytes"));
  EXPECT_EQ(t, Attention().tree) << "a refused node leaves the tree as it was";
  EXPECT_EQ(add(a.q, {"all", 0, {8, 4}, {4, 1}, DType::bf16}), "no error");
}

TEST(DataTree, ViewsWithoutElementsAndScalars) {
  DataTree t("root", 8);
  const int64_t empty = t.add_contiguous(0, "empty", 8, {3, 0}, DType::f32);
  const int64_t scalar = t.add_contiguous(0, "scalar", 4, {}, DType::f32);
  EXPECT_TRUE(t.extent(empty).empty());
  EXPECT_THAT(t.runs(empty), IsEmpty());
  EXPECT_EQ(t.extent(scalar), (Interval{4, 8}));
  EXPECT_THAT(t.runs(scalar), ElementsAre(Interval{4, 8}));
  EXPECT_TRUE(DataTree("nothing", 0).runs(0).empty());
}

TEST(DataTree, RunsAreThoseOfAWalkOverAllElements) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int round = 0; round < 300; ++round) {
    DataNode n{"n", 4 * pick(0, 5), {}, {}, DType::f32, -1};
    for (int64_t d = pick(0, 4); d > 0; --d) n.shape.push_back(pick(1, 4)), n.strides.push_back(pick(0, 9));
    std::set<int64_t> touched;
    std::vector<int64_t> index(n.shape.size(), 0);
    while (true) {
      int64_t at = n.offset;
      for (size_t d = 0; d < index.size(); ++d) at += 4 * index[d] * n.strides[d];
      for (int b = 0; b < 4; ++b) touched.insert(at + b);
      size_t d = 0;
      for (; d < index.size() && ++index[d] == n.shape[d]; ++d) index[d] = 0;
      if (d == index.size()) break;
    }
    DataTree t("root", 4096);
    const int64_t node = t.add(0, n);
    std::set<int64_t> covered;
    int64_t last = -1;
    for (Interval run : t.runs(node)) {
      EXPECT_GT(run.begin, last) << "runs that touch are one run";
      last = run.end;
      for (int64_t b = run.begin; b < run.end; ++b) covered.insert(b);
    }
    EXPECT_EQ(covered, touched);
    EXPECT_EQ(t.extent(node), (Interval{*touched.begin(), *touched.rbegin() + 1}));
  }
}

TEST(DataTree, TextComesBack) {
  DataTree t = Attention().tree;
  t.add_contiguous(0, "odd \"name\"\n", 0, {}, DType::i64);
  EXPECT_EQ(DataTree::parse(t.to_text()), t);
  EXPECT_EQ(DataTree::parse(DataTree("", 0).to_text()), DataTree("", 0));
  EXPECT_THAT(t.to_text(), HasSubstr("tree \"block.0\" bytes 160\n"
                                     "node 1 parent 0 \"qkv\" offset 0 bf16 shape [12,4] strides [4,1]\n"));
}

TEST(DataTree, DamagedTextNamesItsLine) {
  const std::string text = Attention().tree.to_text();
  const auto error = [](std::string t) { return error_of([&] { DataTree::parse(t); }); };
  const auto change = [&](std::string_view from, std::string_view to) {
    std::string t = text;
    return error(t.replace(t.find(from), from.size(), to));
  };
  EXPECT_THAT(change("tree", "trees"), HasSubstr("data tree, line 1: wanted \"tree\", got \"trees\""));
  EXPECT_THAT(change("node 3 ", "node 4 "), HasSubstr("line 4: wanted a number from 3 to 3, got 4"));
  EXPECT_THAT(change("node 2 parent 1", "node 2 parent 2"), HasSubstr("line 3: "));
  EXPECT_THAT(change("bf16", "fp64"), HasSubstr("line 2: dtype"));
  EXPECT_THAT(change("\"q\" offset 0", "\"q\" offset 40"), HasSubstr("line 3: data tree: qkv/q: 64 bytes from 40"));
  EXPECT_THAT(change("end\n", ""), HasSubstr("wanted \"node\" or \"end\", got the end of the text"));
  EXPECT_THAT(error(text + "end\n"), HasSubstr("wanted nothing after \"end\""));
  for (size_t cut = 0; cut < text.size(); ++cut) EXPECT_THAT(error(text.substr(0, cut)), HasSubstr("line ")) << cut;
}

TEST(UnitIntervals, HeadsAsRowsAsColumnsAndExperts) {
  EXPECT_THAT(unit_intervals({8, 4}, 0, 4, 3), ElementsAre(Interval{24, 32}));
  EXPECT_THAT(unit_intervals({3, 8}, 1, 4, 1), ElementsAre(Interval{2, 4}, Interval{10, 12}, Interval{18, 20}));
  EXPECT_THAT(unit_intervals({2, 3, 5}, 0, 2, 1), ElementsAre(Interval{15, 30}));
  EXPECT_THAT(unit_intervals({3, 8}, 1, 1, 0), ElementsAre(Interval{0, 24}));
  EXPECT_THAT(unit_intervals({0, 8}, 1, 4, 1), IsEmpty());
  EXPECT_THAT(unit_intervals({4, 0}, 0, 4, 1), IsEmpty());
  EXPECT_THROW(unit_intervals({8, 4}, 0, 3, 0), ConfigError);
  EXPECT_THROW(unit_intervals({8, 4}, 0, 4, 4), ConfigError);
  EXPECT_THROW(unit_intervals({8, 4}, 0, 0, 0), ConfigError);
  EXPECT_THROW(unit_intervals({8, 4}, 2, 1, 0), ConfigError);
}

}  // namespace
}  // namespace dovetail

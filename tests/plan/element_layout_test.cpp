#include "dovetail/plan/element_layout.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "dovetail/base/error.h"
#include "dovetail/plan/unit_preference.h"

namespace dovetail::plan {
namespace {

LayoutTensor tensor(std::string name, int64_t numel, int64_t block = 1,
                    std::vector<int64_t> edges = {}) {
  return {std::move(name), numel, block, std::move(edges)};
}

std::vector<int64_t> every(int64_t unit, int64_t numel) {
  std::vector<int64_t> edges;
  for (int64_t x = 0; x < numel; x += unit) edges.push_back(x);
  edges.push_back(numel);
  return edges;
}

TEST(ElementLayout, ElementsArePackedDenselyInOrder) {
  LayoutRequest r;
  r.tensors = {tensor("a", 100), tensor("b", 1), tensor("scalar", 1), tensor("none", 0),
               tensor("c", 640)};
  r.degrees = {8, 4, 2};
  r.max_segments = 3;
  const ElementLayout layout = lay_out(r);
  ASSERT_EQ(layout.segments.size(), 1u);
  const SegmentLayout& s = layout.segments[0];
  // 2 + 1 + 1 + 10 = 14 units over 4 zero2 shards: 4 units, 2 of them zero2 shards in a zero3
  // shard.
  EXPECT_EQ(s.shard2, 4 * 64);
  EXPECT_EQ(s.shard3, 8 * 64);
  EXPECT_EQ(s.shard1, 2 * 64);
  EXPECT_TRUE(layout.exact);
  ASSERT_EQ(s.placements.size(), 5u);
  EXPECT_EQ(s.placements[0].tensor, 3);  // owns nothing
  const std::vector<std::pair<int64_t, int64_t>> wanted{{0, 0}, {1, 128}, {2, 192}, {4, 256}};
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_EQ(s.placements[i + 1].tensor, wanted[i].first);
    EXPECT_EQ(s.placements[i + 1].offset, wanted[i].second);
    EXPECT_EQ(s.placements[i + 1].numel, r.tensors[wanted[i].first].numel);
  }
}

TEST(ElementLayout, FineShardNeedNotDivideTheCoarse) {
  LayoutRequest r;
  r.tensors = {tensor("a", 7)};
  r.alignment = 1;
  r.degrees = {3, 1, 1};
  const SegmentLayout s = lay_out(r).segments[0];
  EXPECT_EQ(s.shard3, 7);
  EXPECT_EQ(s.shard1, 3);  // 3, 3 and a short 1
}

// No boundary of any level inside a block, for every block and alignment: counted here in elements,
// without planner code.
TEST(ElementLayout, BlocksHoldAtEveryLevel) {
  std::mt19937 random(7);
  for (int n = 0; n < 300; ++n) {
    LayoutRequest r;
    r.alignment = 1 + random() % 8;
    r.degrees.zero3 = 1 + random() % 3;
    r.degrees.zero2 = r.degrees.zero3 * (1 + random() % 3);
    r.degrees.zero1 = r.degrees.zero2 * (1 + random() % 3);
    r.max_segments = 1 + random() % 3;
    for (int i = 1 + random() % 6; i > 0; --i) {
      const int64_t numel = 1 + random() % 200;
      r.tensors.push_back(tensor("t", numel, 1 + random() % numel));
    }
    size_t placed = 0;
    for (const SegmentLayout& s : lay_out(r).segments) {
      int64_t end = 0;
      ASSERT_EQ(s.shard3 * r.degrees.zero3, s.shard2 * r.degrees.zero2);
      ASSERT_GE(s.shard1 * (r.degrees.zero1 / r.degrees.zero2), s.shard2);
      for (const Placement& p : s.placements) {
        ++placed;
        ASSERT_GE(p.offset, end);
        ASSERT_EQ(p.offset % r.alignment, 0);
        end = p.offset + p.numel;
        ASSERT_LE(end, s.size());
        for (int64_t b = p.offset + 1; b < end; ++b) {
          const bool boundary = (b % s.shard2) % s.shard1 == 0;
          ASSERT_TRUE(!boundary || (b - p.offset) % p.block == 0)
              << "block " << p.block << " alignment " << r.alignment;
        }
      }
    }
    ASSERT_EQ(placed, r.tensors.size());
  }
}

// Two equal shards of 48: given order cuts the matrix of heads inside a head, the order found does
// not.
TEST(ElementLayout, PrefersUnitEdgesAtNoCost) {
  LayoutRequest r;
  r.alignment = 1;
  r.degrees = {2, 2, 2};
  r.tensors = {tensor("b", 24), tensor("heads", 64, 1, every(16, 64)), tensor("c", 8)};
  const ElementLayout layout = lay_out(r);
  EXPECT_EQ(layout.shard1(), 48);
  EXPECT_EQ(layout.exchanged, 0);
  r.tensors[1].unit_edges = {};
  EXPECT_EQ(lay_out(r).segments[0].placements[1].offset, 24);  // nothing to prefer: as given
}

TEST(ElementLayout, PaddingThatIsThereAnywayMovesStartsToUnitEdges) {
  LayoutRequest r;
  r.alignment = 1;
  r.degrees = {2, 2, 2};
  r.tensors = {tensor("heads", 12, 1, every(4, 12)), tensor("b", 1)};
  const ElementLayout layout = lay_out(r);
  EXPECT_EQ(layout.shard1(), 7);
  EXPECT_EQ(layout.exchanged, 1);  // 13 elements in 14: a head is cut 3 to 1 at best
  r.tensors = {tensor("heads", 12, 1, every(4, 12)), tensor("b", 3, 3)};
  EXPECT_EQ(lay_out(r).shard1(), 8);
  EXPECT_EQ(lay_out(r).exchanged, 0);
}

TEST(ElementLayout, PreferenceNeverChangesShards) {
  std::mt19937 random(8);
  for (int n = 0; n < 200; ++n) {
    LayoutRequest plain;
    plain.alignment = 1 + random() % 3;
    plain.degrees = {4, 2, 2};
    plain.max_segments = 1 + n % 2;
    for (int i = 2 + random() % 5; i > 0; --i) {
      const int64_t numel = 1 + random() % 90;
      plain.tensors.push_back(tensor("t", numel, 1 + random() % std::min<int64_t>(numel, 6)));
    }
    LayoutRequest preferring = plain;
    for (LayoutTensor& t : preferring.tensors) t.unit_edges = every(1 + random() % 12, t.numel);
    const ElementLayout a = lay_out(plain), b = lay_out(preferring);
    ASSERT_EQ(a.segments.size(), b.segments.size());
    UnitEdges units{plain.alignment, {}};
    for (const LayoutTensor& t : preferring.tensors) units.edges.push_back(t.unit_edges);
    int64_t before = 0;
    for (size_t i = 0; i < a.segments.size(); ++i) {
      const SegmentLayout& s = a.segments[i];
      ASSERT_EQ(s.shard1, b.segments[i].shard1);
      ASSERT_EQ(s.shard3, b.segments[i].shard3);
      RaggedSegment in_units{s.shard3 / plain.alignment,
                             s.shard2 / plain.alignment,
                             s.shard1 / plain.alignment,
                             0,
                             {}};
      for (const Placement& p : s.placements)
        in_units.placements.push_back({static_cast<int>(p.tensor), p.offset / plain.alignment});
      before += exchanged_elements(in_units, units);
    }
    ASSERT_LE(b.exchanged, before);
  }
}

TEST(ElementLayout, BoundaryUnitPadsInsteadOfCutting) {
  LayoutRequest r;
  r.alignment = 1;
  r.degrees = {2, 2, 2};
  r.tensors = {tensor("matrix", 10, 1, {0, 10}), tensor("b", 4)};
  EXPECT_EQ(lay_out(r).shard1(), 7);
  EXPECT_EQ(lay_out(r).exchanged, 3);
  r.boundary = Boundary::unit;
  EXPECT_EQ(lay_out(r).shard1(), 10);
  EXPECT_EQ(lay_out(r).exchanged, 0);
  r.tensors[0].unit_edges = {0, 3, 4, 10};
  EXPECT_THROW(lay_out(r), ConfigError);
}

// The element exchanged by definition: per unit, its elements minus the most that one shard holds.
TEST(UnitPreference, ExchangedElementsAgainstCounting) {
  std::mt19937 random(9);
  for (int n = 0; n < 500; ++n) {
    const int64_t period = 1 + random() % 20, step = 1 + random() % period, a = 1 + random() % 4;
    const int64_t numel = 1 + random() % 80, offset = random() % 30;
    std::vector<int64_t> edges{0};
    while (edges.back() < numel)
      edges.push_back(std::min<int64_t>(numel, edges.back() + 1 + random() % 15));
    int64_t wanted = 0;
    for (size_t u = 0; u + 1 < edges.size(); ++u) {
      std::map<int64_t, int64_t> held;
      for (int64_t i = edges[u]; i < edges[u + 1]; ++i) {
        const int64_t at = (offset * a + i) / a;
        ++held[at / period * 1000 + at % period / step];
      }
      int64_t most = 0;
      for (auto [shard, count] : held) most = std::max(most, count);
      wanted += edges[u + 1] - edges[u] - most;
    }
    const RaggedSegment s{period, period, step, 0, {{0, offset}}};
    ASSERT_EQ(exchanged_elements(s, {a, {edges}}), wanted);
  }
}

TEST(ElementLayout, BadInputNamesTheTensor) {
  const auto message = [](LayoutTensor t) {
    LayoutRequest r;
    r.tensors = {std::move(t)};
    try {
      lay_out(r);
    } catch (const ConfigError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_NE(message(tensor("w1", 4, 5)).find("w1"), std::string::npos);
  EXPECT_NE(message(tensor("w2", -1)).find("w2"), std::string::npos);
  EXPECT_NE(message(tensor("w3", 4, 1, {0, 2, 2, 4})).find("w3"), std::string::npos);
  EXPECT_NE(message(tensor("w4", 4, 1, {0, 3})).find("w4"), std::string::npos);
  LayoutRequest r;
  r.alignment = 0;
  EXPECT_THROW(lay_out(r), ConfigError);
}

}  // namespace
}  // namespace dovetail::plan

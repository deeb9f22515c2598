#include "dovetail/layout/unit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dovetail/base/error.h"
#include "dovetail/layout/data_tree.h"

namespace dovetail {
namespace {

using ::testing::HasSubstr;

const TensorSpec kMatrix{.name = "w", .shape = {6, 10}, .heads = 3};
const TensorSpec kColumns{.name = "o", .shape = {6, 10}, .heads = 5, .heads_dim = 1};
const TensorSpec kExperts{.name = "e", .shape = {4, 3, 5}, .kind = ParamKind::expert};

std::string error_of(const TensorSpec& t, const Unit& unit) {
  try {
    unit_places(t, unit);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "";
}

// Every element of the tensor in exactly one unit, and units agree with intervals and packed
// numbers.
void check_partition(const TensorSpec& t, const Unit& unit) {
  std::vector<int> seen(t.numel());
  for (const UnitPlace& p : unit_places(t, unit)) {
    int64_t packed = 0;
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.columns; ++c, ++packed) {
        const int64_t element = p.first + r * p.stride + c;
        ASSERT_LT(element, t.numel());
        ++seen[element];
        EXPECT_EQ(p.packed_in({element, element + 1}), (Interval{packed, packed + 1}));
        EXPECT_EQ(p.runs({packed, packed + 1}), (IntervalList{{element, element + 1}}));
      }
    EXPECT_EQ(packed, p.numel());
  }
  for (int count : seen) EXPECT_EQ(count, 1);
}

TEST(Unit, PlacesPartitionTheTensor) {
  for (const TensorSpec& t :
       {kMatrix, kColumns, kExperts,
        TensorSpec{.name = "v", .shape = {7}, .kind = ParamKind::vector},
        TensorSpec{.name = "c", .shape = {4, 3, 2, 2}, .kind = ParamKind::conv},
        TensorSpec{.name = "s", .shape = {}, .kind = ParamKind::vector}})
    for (const Unit& u :
         {Unit::of_matrix(), Unit::of_tile(4, 3), Unit::of_tile(100, 1), Unit::of_tile(1, 100)})
      check_partition(t, u);
  check_partition(kMatrix, Unit::of_node("head"));
  check_partition(kColumns, Unit::of_node("head"));
  check_partition(kExperts, Unit::of_node("expert"));
}

TEST(Unit, EveryIntervalOfTheTensorIsOnePackedRun) {
  for (const UnitPlace& p : unit_places(kColumns, Unit::of_node("head")))
    for (int64_t begin = 0; begin <= 60; ++begin)
      for (int64_t end = begin; end <= 60; ++end) {
        std::vector<int64_t> inside;
        for (int64_t i = 0; i < p.numel(); ++i) {
          const int64_t element = p.first + i / p.columns * p.stride + i % p.columns;
          if (begin <= element && element < end) inside.push_back(i);
        }
        const Interval packed = p.packed_in({begin, end});
        ASSERT_EQ(packed.size(), std::ssize(inside));
        if (inside.empty()) continue;
        ASSERT_EQ(packed, (Interval{inside.front(), inside.back() + 1}));
        ASSERT_EQ(total_size(p.runs(packed)), packed.size());
      }
}

TEST(Unit, HeadsAreTheIntervalsOfTheDataTree) {
  for (const TensorSpec& t : {kMatrix, kColumns}) {
    const auto places = unit_places(t, Unit::of_node("head"));
    for (int64_t h = 0; h < t.heads; ++h)
      EXPECT_EQ(places[h].runs({0, places[h].numel()}),
                unit_intervals(t.shape, t.heads_dim, t.heads, h));
  }
}

TEST(Unit, NamedNodesMayHaveSeveralSizes) {
  TensorSpec t{.name = "qkv", .shape = {6, 4}};
  t.nodes = {{"qkv", 0, {0, 4, 5, 6}}, {"half", 1, {0, 1, 4}}};
  EXPECT_EQ(unit_places(t, Unit::of_node("qkv")),
            (std::vector<UnitPlace>{{0, 4, 4, 4}, {16, 1, 4, 4}, {20, 1, 4, 4}}));
  EXPECT_EQ(unit_places(t, Unit::of_node("half")),
            (std::vector<UnitPlace>{{0, 6, 1, 4}, {1, 6, 3, 4}}));
  check_partition(t, Unit::of_node("half"));
}

TEST(Unit, WhatIsNotThereIsNamed) {
  EXPECT_THAT(error_of(kMatrix, Unit::of_node("expert")),
              HasSubstr("w: an operation wants its nodes \"expert\""));
  EXPECT_THAT(error_of({.name = "w", .shape = {7, 2}, .heads = 3}, Unit::of_node("head")),
              HasSubstr("[7, 2]"));
  EXPECT_THAT(error_of(kMatrix, Unit::of_tile(0, 3)), HasSubstr("0 x 3"));
  TensorSpec t = kMatrix;
  t.nodes = {{"half", 0, {0, 3}}};
  EXPECT_THAT(error_of(t, Unit::of_node("half")), HasSubstr("from 0 to 6"));
  t = kExperts;
  t.nodes = {{"half", 1, {0, 1, 3}}};
  EXPECT_THAT(error_of(t, Unit::of_node("half")), HasSubstr("dimension 1"));
  EXPECT_TRUE(unit_places({.name = "z", .shape = {0, 5}}, Unit::of_matrix()).empty());
}

TEST(Unit, BlocksAndRowsAreNeverCut) {
  EXPECT_EQ(uncut_elements(kMatrix, Unit{}), 1);
  EXPECT_EQ(uncut_elements(kMatrix, Unit::of_row()), 10);
  EXPECT_EQ(uncut_elements(kMatrix, Unit::of_block(256)), 60);
  EXPECT_EQ(uncut_elements(kMatrix, Unit::of_block(8)), 8);
  EXPECT_EQ(uncut_elements(kMatrix, Unit::of_matrix()), 1);
  EXPECT_THROW(uncut_elements(kMatrix, Unit::of_block(0)), ConfigError);
}

}  // namespace
}  // namespace dovetail

#include "dovetail/layout/block.h"

#include <gtest/gtest.h>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

constexpr BlockKind kKinds[] = {BlockKind::element, BlockKind::row,    BlockKind::rows32, BlockKind::rows128,
                                BlockKind::head,    BlockKind::expert, BlockKind::matrix};

std::vector<int64_t> blocks(const TensorSpec& t) {
  std::vector<int64_t> found;
  for (BlockKind kind : kKinds) found.push_back(block_elements(t, kind));
  return found;
}

using Blocks = std::vector<int64_t>;

TEST(Block, OfEveryKindOfTensor) {
  //                                                                element, row, 32, 128, head, expert, matrix
  EXPECT_EQ(blocks({"q", {256, 100}, ParamKind::matrix, 4, 0}), (Blocks{1, 100, 3200, 12800, 6400, 100, 25600}));
  EXPECT_EQ(blocks({"o", {256, 100}, ParamKind::matrix, 4, 1}), (Blocks{1, 100, 3200, 12800, 100, 100, 25600}));
  EXPECT_EQ(blocks({"m", {16, 10}, ParamKind::matrix}), (Blocks{1, 10, 160, 160, 10, 10, 160}));
  EXPECT_EQ(blocks({"e", {1000, 8}, ParamKind::embedding}), (Blocks{1, 8, 256, 1024, 8, 8, 8}));
  EXPECT_EQ(blocks({"v", {77}, ParamKind::vector}), (Blocks{1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(blocks({"s", {}, ParamKind::vector}), (Blocks{1, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(blocks({"c", {64, 3, 5, 5}, ParamKind::conv}), (Blocks{1, 75, 2400, 4800, 75, 75, 4800}));
  // 96 rows an expert: 32 divide them, 128 do not.
  EXPECT_EQ(blocks({"x", {4, 96, 7}, ParamKind::expert}), (Blocks{1, 7, 224, 672, 7, 672, 2688}));
  EXPECT_EQ(blocks({"z", {0, 8}, ParamKind::matrix}), (Blocks{1, 1, 1, 1, 1, 1, 1}));
}

TEST(Block, NamesParseBack) {
  for (BlockKind kind : kKinds) EXPECT_EQ(parse_block_kind(name_of(kind)), kind);
  EXPECT_THROW(parse_block_kind("rows"), ConfigError);
  for (ParamKind kind :
       {ParamKind::matrix, ParamKind::embedding, ParamKind::vector, ParamKind::conv, ParamKind::expert})
    EXPECT_EQ(parse_param_kind(name_of(kind)), kind);
  EXPECT_THROW(parse_param_kind("tensor"), ConfigError);
}

TEST(TensorSpec, NumelRowAndKind) {
  EXPECT_EQ((TensorSpec{"s", {}}).numel(), 1);
  EXPECT_EQ((TensorSpec{"z", {3, 0}}).numel(), 0);
  EXPECT_EQ((TensorSpec{"z", {3, 0}}).row(), 1);
  EXPECT_EQ((TensorSpec{"c", {2, 3, 4}, ParamKind::conv}).row(), 12);
  EXPECT_EQ((TensorSpec{"x", {2, 3, 4}, ParamKind::expert}).row(), 4);
  EXPECT_EQ(kind_of_shape({}), ParamKind::vector);
  EXPECT_EQ(kind_of_shape({4}), ParamKind::vector);
  EXPECT_EQ(kind_of_shape({4, 4}), ParamKind::matrix);
  EXPECT_EQ(kind_of_shape({4, 4, 3}), ParamKind::conv);
}

}  // namespace
}  // namespace dovetail

#include <gtest/gtest.h>

#include "dovetail/base/dtype.h"
#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/base/interval.h"
#include "dovetail/base/philox.h"

namespace dovetail {
namespace {

TEST(Error, CheckPrintsBothSides) {
  try {
    DT_CHECK_EQ(2 + 1, 4, "tensor {}", "wq");
    FAIL();
  } catch (const InvariantError& e) {
    EXPECT_NE(std::string(e.what()).find("2 + 1 == 4: 3 against 4: tensor wq"), std::string::npos) << e.what();
  }
}

TEST(Interval, IntersectionOfDisjointIsTheOneEmptyInterval) {
  EXPECT_EQ(intersect({0, 5}, {3, 9}), (Interval{3, 5}));
  EXPECT_EQ(intersect({0, 3}, {3, 9}), Interval{});
  EXPECT_TRUE((Interval{0, 4}).contains(Interval{}));
}

TEST(DType, NamesParseBack) {
  for (DType t : {DType::f32, DType::bf16, DType::u8, DType::i64}) EXPECT_EQ(parse_dtype(name_of(t)), t);
  EXPECT_THROW(parse_dtype("fp64"), ConfigError);
}

// Known answers of the Random123 distribution.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Hash, SeedAndContentMatter) {
  EXPECT_EQ(hash64("abc"), hash64("abc"));
  EXPECT_NE(hash64("abc"), hash64("abd"));
  EXPECT_NE(hash64("abc"), hash64("abc", 1));
}

}  // namespace
}  // namespace dovetail

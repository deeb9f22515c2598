#include "dovetail/comm/tree_sum.h"

#include <gtest/gtest.h>

#include <cstring>

#include <ATen/ATen.h>

#include "dovetail/base/error.h"
#include "dovetail/comm/c10d/native_group.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

std::vector<float> sum_of(const std::vector<int>& ranks, int64_t n, int64_t shift) {
  std::vector<std::vector<std::byte>> memory;
  std::vector<const std::byte*> inputs;
  for (int r : ranks) {
    auto& m = memory.emplace_back(static_cast<size_t>(4 * n + shift + 64));
    std::byte* at = m.data() + shift;
    for (int64_t i = 0; i < n; ++i) {
      const float v = value_at(r, i);
      std::memcpy(at + 4 * i, &v, 4);
    }
    inputs.push_back(at);
  }
  std::vector<float> out(static_cast<size_t>(n));
  SumTree(ranks).sum(inputs, DType::f32, out);
  return out;
}

TEST(SumTree, FollowsRankNumbersNotMemberOrder) {
  for (int64_t i = 0; i < 200; ++i) {
    const auto v = [&](int r) { return value_at(r, i); };
    EXPECT_EQ(sum_of({0, 1, 2, 3}, 200, 0)[i], (v(0) + v(1)) + (v(2) + v(3)));
    EXPECT_EQ(sum_of({3, 0, 2, 1}, 200, 0)[i], (v(0) + v(1)) + (v(2) + v(3)));
    EXPECT_EQ(sum_of({0, 1, 2}, 200, 0)[i], (v(0) + v(1)) + v(2));
    EXPECT_EQ(sum_of({0, 1, 2, 3, 4, 5}, 200, 0)[i], ((v(0) + v(1)) + (v(2) + v(3))) + (v(4) + v(5)));
    EXPECT_EQ(sum_of({9, 1, 5, 13}, 200, 0)[i], (v(1) + v(5)) + (v(9) + v(13)));
    EXPECT_EQ(sum_of({1, 2, 3}, 200, 0)[i], v(1) + (v(2) + v(3)));
  }
}

TEST(SumTree, BitsDoNotDependOnWhereAnElementLies) {
  for (const std::vector<int>& ranks : {std::vector{0, 1}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6}}) {
    const auto aligned = sum_of(ranks, 3000, 0);
    for (int64_t shift : {1, 2, 4, 6, 12}) EXPECT_EQ(sum_of(ranks, 3000, shift), aligned);
    for (int64_t n : {1, 2, 15, 1023, 1025}) {
      const auto part = sum_of(ranks, n, 0);
      EXPECT_TRUE(std::equal(part.begin(), part.end(), aligned.begin()));
    }
  }
}

TEST(SumTree, KeepsInfinitiesAndNaN) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> a{inf, inf, 1, -0.0f}, b{1, -inf, std::nanf(""), -0.0f};
  const std::byte* inputs[] = {std::as_bytes(std::span(a)).data(), std::as_bytes(std::span(b)).data()};
  std::vector<float> out(4);
  SumTree(std::vector{0, 1}).sum(inputs, DType::f32, out);
  EXPECT_EQ(out[0], inf);
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_TRUE(std::isnan(out[2]));
  EXPECT_TRUE(std::signbit(out[3]));
}

// What CUDA memory gets: the same tree by tensor operations.
TEST(SumTree, TensorsGiveTheSameBits) {
  for (const std::vector<int>& ranks : {std::vector{0, 1}, {3, 0, 2, 1}, {0, 1, 2}, {6, 5, 4, 3, 2, 1, 0}}) {
    const SumTree tree(ranks);
    for (DType dtype : {DType::f32, DType::bf16}) {
      std::vector<at::Tensor> inputs;
      std::vector<const std::byte*> pointers;
      for (int r : ranks) {
        at::Tensor t = at::empty({1500}, at::kFloat);
        for (int i = 0; i < 1500; ++i) t.data_ptr<float>()[i] = value_at(r, i);
        inputs.push_back(dtype == DType::f32 ? t : t.to(at::kBFloat16));
      }
      for (const at::Tensor& t : inputs) pointers.push_back(static_cast<const std::byte*>(t.const_data_ptr()));
      for (SumOutput how : {SumOutput{}, {.accumulate = true}, {.scale = 0.3f}, {.accumulate = true, .scale = 0.3f}}) {
        at::Tensor expected = at::full({1500}, 0.25f), got = expected.clone();
        tree.sum(pointers, dtype, {expected.data_ptr<float>(), 1500}, how);
        sum_tensors(tree, inputs, got, how);
        EXPECT_TRUE(at::equal(got, expected));
      }
    }
  }
}

TEST(SumTree, RefusesOtherTypesAndRepeatedRanks) {
  std::vector<float> out(1);
  const std::byte* input = std::as_bytes(std::span(out)).data();
  EXPECT_THROW(SumTree(std::vector{0}).sum({&input, 1}, DType::i64, out), ConfigError);
  EXPECT_THROW(SumTree(std::vector{0, 2, 0}), InvariantError);
}

}  // namespace
}  // namespace dovetail::comm

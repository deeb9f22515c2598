#include "dovetail/engine/gradient_move.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "dovetail/storage/tensor_heap.h"

namespace dovetail::engine_detail {
namespace {

constexpr int64_t kLarge = (int64_t{36} << 20) / 4 + 7;  // beyond what keeps its pages

at::Tensor values(int64_t n) { return at::arange(1, n + 1, at::kFloat); }

// Of tensors from malloc and, with true, from the heap.
class MoveGradient : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!GetParam()) return;
    TensorHeap* heap = TensorHeap::install();
    if (heap == nullptr) GTEST_SKIP() << "no heap under the address sanitizer";
    heap->switch_on(true);
  }
  void TearDown() override {
    if (TensorHeap* heap = TensorHeap::installed()) heap->switch_on(false);
  }
};

TEST_P(MoveGradient, CopiesEverySizeAndPlace) {
  for (const int64_t n : {int64_t{0}, int64_t{3}, int64_t{16'384}, int64_t{16'391}, int64_t{300'001}, kLarge})
    for (const int64_t shift : {0, 1}) {  // a target that no vector store fits
      const at::Tensor memory = at::full({n + 2}, -1.0f);
      const at::Tensor target = memory.slice(0, shift, shift + n);
      at::Tensor gradient = values(n);
      move_gradient(gradient, {}, target);
      EXPECT_TRUE(at::equal(target, values(n))) << n << " " << shift;
      for (int64_t i = 0; i < n + 2; ++i)
        if (i < shift || i >= shift + n) {
          EXPECT_EQ(memory[i].item<float>(), -1) << n << " " << shift;
        }
    }
}

TEST_P(MoveGradient, ConvertsWhatIsLaidOutOtherwise) {
  const at::Tensor target = at::empty({3, 4}, at::kBFloat16);
  move_gradient(values(12).view({4, 3}).t(), {}, target);
  EXPECT_TRUE(at::equal(target, values(12).view({4, 3}).t().to(at::kBFloat16)));
}

TEST_P(MoveGradient, GivesPagesBackOnlyWhereNobodyElseReads) {
  const at::Tensor target = at::empty({kLarge});
  {
    at::Tensor gradient = values(kLarge);
    const at::Tensor given = gradient.detach();  // as autograd's own reference
    move_gradient(gradient, given, target);
    EXPECT_TRUE(at::equal(target, values(kLarge)));
    EXPECT_EQ(gradient[kLarge / 2].item<float>(), 0);  // its page is gone
  }
  // Of a linear layer autograd has a view of what was computed, or the gradient is one.
  for (const bool ours : {false, true}) {
    at::Tensor given = values(kLarge).view({1, kLarge}), gradient = given.detach();
    if (ours) std::swap(gradient, given);
    move_gradient(gradient, given, target.view({1, kLarge}));
    EXPECT_TRUE(at::equal(target, values(kLarge)));
    EXPECT_EQ(gradient[0][kLarge / 2].item<float>(), 0);
  }
  for (const bool viewed_twice : {false, true})
    for (const bool ours : {false, true}) {
      at::Tensor kept = values(kLarge);
      at::Tensor given = kept.view({1, kLarge}), gradient = given.detach();
      if (ours) std::swap(gradient, given);
      if (viewed_twice) kept = kept.view({kLarge, 1});
      move_gradient(gradient, given, target.view({1, kLarge}));
      EXPECT_TRUE(at::equal(kept.view(kLarge), values(kLarge)));
    }
  at::Tensor gradient = values(kLarge);
  {
    const at::Tensor given = gradient.detach(), kept = gradient.detach();
    move_gradient(gradient, given, target);
    EXPECT_TRUE(at::equal(kept, target));
  }
  {
    const at::Tensor also = gradient;
    move_gradient(gradient, {}, target);
    EXPECT_TRUE(at::equal(also, target));
  }
  std::vector<float> owned(kLarge, 2.0f);  // of somebody who will use it again
  move_gradient(at::from_blob(owned.data(), {kLarge}), {}, target);
  EXPECT_EQ(owned[kLarge / 2], 2.0f);
  EXPECT_TRUE(target.eq(2).all().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(, MoveGradient, testing::Bool());

}  // namespace
}  // namespace dovetail::engine_detail

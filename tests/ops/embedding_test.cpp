#include "dovetail/ops/embedding.h"

#include "testing.h"

namespace dovetail::ops {
namespace {

using namespace testing;

at::Tensor tokens(std::vector<int64_t> values) { return torch::tensor(values, at::kLong); }

TEST(Embedding, ValuesAndGradients) {
  torch::manual_seed(1);
  for (auto type : {at::kFloat, at::kBFloat16})
    for (int64_t dim : {1, 7, 64})
      for (const auto& shape : std::vector<std::vector<int64_t>>{{13}, {2, 5}, {0}, {1, 1, 3}}) {
        const auto w = torch::randn({9, dim}).to(type).set_requires_grad(true);
        const auto index = torch::randint(0, 9, shape, at::kLong);
        const auto got = embedding_rows(index, w);
        const auto w64 = w.detach().to(at::kDouble).set_requires_grad(true);
        const auto want = torch::embedding(w64, index);
        EXPECT_TRUE(at::equal(got.to(at::kDouble), want));
        const auto g = torch::randn_like(got);
        got.backward(g);
        want.backward(g.to(at::kDouble));
        expect_close(w.grad(), w64.grad(), bound_of(type));
      }
}

// A thousand equal contributions: adding them in bf16 would stop at 256.
TEST(Embedding, SumsInFp32) {
  const auto w = torch::zeros({3, 4}).to(at::kBFloat16).set_requires_grad(true);
  embedding_rows(torch::ones({1000}, at::kLong), w).sum().backward();
  EXPECT_EQ(w.grad()[1][0].item<float>(), 1000);
  EXPECT_EQ(w.grad()[0][0].item<float>(), 0);
}

TEST(Embedding, WritesIntoTheSink) {
  for (bool transposed : {false, true}) {
    Embedding table(5, 3);
    {
      torch::NoGradGuard no_grad;
      table.weight.normal_();
    }
    const auto sink =
        std::make_shared<FlatSink>(transposed ? torch::empty({3, 5}).t() : torch::empty({5, 3}));
    table.set_sink(table.weight, sink);
    table.forward(tokens({1, 4, 1})).sum().backward();
    const auto want = torch::tensor({0., 2., 0., 0., 1.}, at::kFloat).view({5, 1}).expand({5, 3});
    EXPECT_TRUE(at::equal(sink->view, want));
    EXPECT_FALSE(table.weight.grad().defined());
    table.forward(tokens({0})).sum().backward();
    EXPECT_EQ(sink->view.sum().item<float>(), 12);
    EXPECT_EQ(sink->requests, 2);
    const std::vector<at::Tensor> asked_of = {table.weight};
    const auto asked = torch::autograd::grad({table.forward(tokens({2})).sum()}, asked_of);
    EXPECT_EQ(asked[0].sum().item<float>(), 3);
    EXPECT_EQ(sink->requests, 2);
    table.set_sink(table.weight, nullptr);
    table.forward(tokens({0})).sum().backward();
    EXPECT_EQ(table.weight.grad().sum().item<float>(), 3);
  }
}

TEST(Embedding, SecondOrder) {
  const auto w = torch::randn({4, 2}).set_requires_grad(true);
  const auto loss = embedding_rows(tokens({1, 1, 3}), w).pow(3).sum();
  const auto g = torch::autograd::grad({loss}, {w}, {}, true, true)[0];
  g.pow(2).sum().backward();  // d/dw sum (6 w^2)^2 for row 1, (3 w^2)^2 for row 3
  expect_close(w.grad()[1], 144 * w[1].pow(3), 1e-5);
  expect_close(w.grad()[3], 36 * w[3].pow(3), 1e-5);
}

TEST(Embedding, NamesTheBadIndex) {
  const auto w = torch::zeros({4, 2});
  EXPECT_NE(message_of<ConfigError>([&] {
              embedding_rows(tokens({1, -1}), w);
            }).find("index -1 at position 1 is outside [0, 4)"),
            std::string::npos);
  EXPECT_THROW(embedding_rows(tokens({4}), w), ConfigError);
  EXPECT_THROW(embedding_rows(torch::zeros({2}), w), ConfigError);
}

}  // namespace
}  // namespace dovetail::ops

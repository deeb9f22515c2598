#include "dovetail/update/matrix_root.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "dovetail/base/error.h"
#include "tests/update/shampoo_support.h"

namespace dovetail {
namespace {

Values lower(const at::Tensor& matrix) {
  Values values;
  for (int64_t i = 0; i < matrix.size(0); ++i)
    for (int64_t j = 0; j <= i; ++j) values.push_back(matrix[i][j].item<float>());
  return values;
}

// By the definition of the format, one entry at a time.
at::Tensor whole(const Values& triangle, int64_t n) {
  at::Tensor matrix = torch::zeros({n, n}, torch::kFloat64);
  auto entry = matrix.accessor<double, 2>();
  size_t at = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j <= i; ++j, ++at) entry[i][j] = entry[j][i] = triangle[at];
  return matrix;
}

struct Aligned {
  explicit Aligned(int64_t bytes) : memory(torch::empty({bytes}, torch::kUInt8)) {}  // ATen aligns to 64
  std::span<std::byte> span() {
    return {static_cast<std::byte*>(memory.data_ptr()), static_cast<size_t>(memory.numel())};
  }
  at::Tensor memory;
};

// Symmetric, with these eigenvalues.
at::Tensor with_eigenvalues(const at::Tensor& eigenvalues, uint64_t seed) {
  const int64_t n = eigenvalues.size(0);
  const auto [q, r] = torch::linalg_qr(in_double(normal_values(n * n, seed), {n, n}));
  return q.matmul(torch::diag(eigenvalues)).matmul(q.t());
}

std::optional<double> root_of(const Values& a, int64_t n, int order, double epsilon, Values& root) {
  Aligned workspace(inverse_root_workspace(n));
  return inverse_root(a, n, order, epsilon, root, workspace.span());
}

TEST(ShampooRoot, ExpandsTriangles) {
  for (const int64_t n : {0, 1, 2, 31, 32, 33, 97}) {
    const Values triangle = normal_values(triangle_values(n), 1);
    at::Tensor got = torch::zeros({n, n}, torch::kFloat32);
    expand_triangle(triangle, n, got.data_ptr<float>());
    EXPECT_TRUE(torch::equal(got.to(torch::kFloat64), whole(triangle, n))) << n;
  }
  EXPECT_THROW(expand_triangle(Values(5), 3, nullptr), InvariantError);
}

TEST(ShampooRoot, AddsProducts) {
  for (const auto& [rows, columns] :
       {std::pair<int64_t, int64_t>{1, 1}, {5, 3}, {63, 64}, {65, 130}, {200, 70}, {600, 33}}) {
    const at::Tensor h = torch::tensor(normal_values(rows * columns, 1)).reshape({rows, columns}).contiguous();
    for (const Gram gram : {Gram::of_rows, Gram::of_columns}) {
      const at::Tensor a = (gram == Gram::of_rows ? h : h.t()).to(torch::kFloat64);
      const int64_t n = a.size(0);
      Values sum = normal_values(triangle_values(n), 2);
      const at::Tensor wanted = 0.75 * whole(sum, n) + 0.25 * a.matmul(a.t());
      Aligned workspace(gram_workspace(n));
      add_gram(gram, h.data_ptr<float>(), rows, columns, 0.75f, 0.25f, sum, workspace.span());
      EXPECT_LT(difference(whole(sum, n), wanted), 1e-6) << rows << " x " << columns;
    }
  }
  Aligned small(gram_workspace(65) - 64);
  const at::Tensor h = torch::zeros({65, 2}, torch::kFloat32);
  Values sum(triangle_values(65));
  EXPECT_THROW(add_gram(Gram::of_rows, h.data_ptr<float>(), 65, 2, 1, 1, sum, small.span()), InvariantError);
}

TEST(ShampooRoot, SatisfiesItsEquation) {
  for (const int64_t n : {1, 2, 3, 64, 65, 150}) {
    for (const int order : {2, 4}) {
      for (const double scale : {1e-12, 1.0, 1e12}) {
        const at::Tensor eigenvalues = torch::logspace(0, -3, n, 10, torch::kFloat64) * scale;
        const at::Tensor a = whole(lower(with_eigenvalues(eigenvalues, 7)), n);
        const double epsilon = 1e-6;
        Values root(triangle_values(n));
        const auto lambda = root_of(lower(a), n, order, epsilon, root);
        ASSERT_TRUE(lambda) << n;
        EXPECT_NEAR(*lambda, std::get<0>(torch::linalg_eigh(a)).max().item<double>(), 1e-12 * scale);
        const at::Tensor x = whole(root, n), identity = torch::eye(n, torch::kFloat64);
        const at::Tensor damped = a / *lambda + epsilon * identity;
        // Entries of X, up to 1000^(1/order), are rounded to fp32 and taken to the power `order`.
        EXPECT_LT(difference(torch::linalg_matrix_power(x, order).matmul(damped), identity), 1e-3) << n;
        const auto [w, v] = torch::linalg_eigh(damped);
        EXPECT_LT(difference(x, v.matmul(torch::diag(w.pow(-1.0 / order))).matmul(v.t())), 1e-6) << n;
      }
    }
  }
}

TEST(ShampooRoot, DampsWhatIsSingular) {
  const int64_t n = 40;
  at::Tensor eigenvalues = torch::zeros({n}, torch::kFloat64);
  eigenvalues[3] = 5;
  const at::Tensor a = with_eigenvalues(eigenvalues, 3);
  for (const double epsilon : {1e-2, 1e-6, 1e-9}) {
    Values root(triangle_values(n));
    ASSERT_TRUE(root_of(lower(a), n, 4, epsilon, root)) << epsilon;
    const at::Tensor w = std::get<0>(torch::linalg_eigh(whole(root, n)));
    EXPECT_NEAR(w.min().item<double>(), 1, 1e-2) << epsilon;
    EXPECT_LE(w.max().item<double>(), std::pow(epsilon, -0.25) * 1.0001) << epsilon;
  }
}

TEST(ShampooRoot, RefusesWhatHasNone) {
  const int64_t n = 40;
  const Values before(triangle_values(n), 7);
  Values root = before;
  const auto refused = [&](const Values& a, double epsilon) {
    const bool none = !root_of(a, n, 4, epsilon, root);
    EXPECT_EQ(root, before);
    return none;
  };
  at::Tensor eigenvalues = torch::logspace(0, -2, n, 10, torch::kFloat64);
  const Values sound = lower(with_eigenvalues(eigenvalues, 3));
  EXPECT_TRUE(refused(Values(triangle_values(n), 0), 1e-6));
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    Values a = sound;
    a[100] = bad;
    EXPECT_TRUE(refused(a, 1e-6)) << bad;
  }
  eigenvalues.narrow(0, 5, n - 5).zero_();
  EXPECT_TRUE(refused(lower(with_eigenvalues(eigenvalues, 3)), 1e-30));  // singular, not damped
  EXPECT_TRUE(refused(lower(-with_eigenvalues(eigenvalues, 3)), 1e-6));  // not positive
  // Far from semidefinite: no root of that matrix, whatever the decomposition says.
  eigenvalues[7] = -0.9;
  EXPECT_TRUE(refused(lower(with_eigenvalues(eigenvalues, 3)), 1e-3));
  EXPECT_TRUE(root_of(sound, n, 4, 1e-30, root));  // well conditioned: needs no damping
  EXPECT_NE(root, before);
}

}  // namespace
}  // namespace dovetail

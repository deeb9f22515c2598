#include "tests/update/reference.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <random>

namespace dovetail {
namespace {

std::vector<float>& values_of(Parameter& p, const std::string& name) {
  if (name == kWeight) return p.weight;
  if (name == kGrad) return p.grad;
  return p.state.at(name);
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<int64_t> random_cuts(int64_t n, std::mt19937_64& random) {
  std::vector<int64_t> cuts(random() % 12);
  for (int64_t& c : cuts) c = static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

}  // namespace

std::vector<float> random_values(int64_t n, uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random);
  return values;
}

Parameter::Parameter(TensorSpec tensor, uint64_t seed)
    : spec(std::move(tensor)),
      weight(random_values(spec.numel(), seed, 1)),
      grad(random_values(spec.numel(), seed + 1, 1)) {}

void Parameter::run(const UpdateOp& op, const StepContext& context,
                    const std::vector<int64_t>& cuts) {
  for (const StateField& f : op.state(spec))
    state.try_emplace(f.name, std::vector<float>(static_cast<size_t>(spec.numel()), f.initial));

  std::vector<int64_t> edges = cuts;
  edges.insert(edges.begin(), 0);
  edges.push_back(spec.numel());
  for (size_t e = 0; e + 1 < edges.size(); ++e) {
    const Interval part{edges[e], edges[e + 1]};
    std::vector<std::vector<float>> copies;
    std::vector<Field> fields;
    const std::vector<FieldUse> uses = op.uses(spec);
    for (const FieldUse& use : uses) {
      const auto& all = values_of(*this, use.name);
      copies.emplace_back(all.begin() + part.begin, all.begin() + part.end);
    }
    for (size_t i = 0; i < uses.size(); ++i)
      fields.push_back({uses[i].name, DType::f32, reinterpret_cast<std::byte*>(copies[i].data())});
    op.run({&spec, 0, part, fields}, context);
    for (size_t i = 0; i < uses.size(); ++i) {
      auto& all = values_of(*this, uses[i].name);
      if (uses[i].access == Access::read) {
        EXPECT_TRUE(std::equal(copies[i].begin(), copies[i].end(), all.begin() + part.begin))
            << uses[i].name;
      }
      std::copy(copies[i].begin(), copies[i].end(), all.begin() + part.begin);
    }
  }
}

at::Tensor to_torch(const std::vector<float>& values) {
  return torch::tensor(values, torch::kFloat32);
}

double relative_difference(const std::vector<float>& values, const at::Tensor& reference) {
  const at::Tensor wanted = reference.detach().to(torch::kFloat64).flatten();
  const at::Tensor got = to_torch(values).to(torch::kFloat64);
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

void expect_same_bits_for_any_split(const UpdateOp& op) {
  std::mt19937_64 random(11);
  for (int64_t n : {0, 1, 7, 16, 33, 1001, 4099}) {
    Parameter whole({.name = "w", .shape = {n}, .kind = ParamKind::matrix}, 5);
    Parameter cut = whole;
    for (int64_t step = 1; step <= 5; ++step) {
      whole.grad = cut.grad = random_values(n, 20 + static_cast<uint64_t>(step), 0.1f);
      const StepContext context{.step = step, .lr = 0.01f, .grad_scale = 0.37f};
      whole.run(op, context);
      cut.run(op, context, random_cuts(n, random));
      ASSERT_TRUE(same_bits(whole.weight, cut.weight)) << n << " elements, step " << step;
      for (const auto& [name, values] : whole.state)
        ASSERT_TRUE(same_bits(values, cut.state.at(name)))
            << name << ", " << n << " elements, step " << step;
    }
  }
}

}  // namespace dovetail

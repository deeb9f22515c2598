#include "tests/update/shampoo_support.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstring>
#include <random>

namespace dovetail {
namespace {

constexpr float kUntouched = -12345.5f;

// Memory with a margin on either side that has to stay as it is.
class Guarded {
 public:
  // `shift` floats off 64-byte alignment.
  Guarded(int64_t n, int64_t shift) : memory_(static_cast<size_t>(n + 64 + shift), kUntouched), n_(n) {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data() + 16);
    at_ = memory_.data() + 16 + (64 - address % 64) % 64 / sizeof(float) + shift;
  }
  float* data() { return at_; }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(at_); }
  bool intact() const {
    for (const float* p = memory_.data(); p < memory_.data() + memory_.size(); ++p)
      if ((p < at_ || p >= at_ + n_) && *p != kUntouched) return false;
    return true;
  }

 private:
  Values memory_;
  int64_t n_;
  float* at_;
};

}  // namespace

Values normal_values(int64_t n, uint64_t seed, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  Values values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random);
  return values;
}

at::Tensor in_double(const Values& values, at::IntArrayRef shape) {
  return torch::tensor(values, torch::kFloat32).to(torch::kFloat64).reshape(shape);
}

double difference(const at::Tensor& got, const at::Tensor& wanted) {
  return ((got - wanted).norm() / wanted.norm()).item<double>();
}

bool same_bits(const Values& a, const Values& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

Held::Held(TensorSpec tensor, UpdateOps list, uint64_t seed)
    : spec(std::move(tensor)), ops(std::move(list)) {
  fields["weight"] = normal_values(spec.numel(), seed);
  for (const auto& op : ops)
    for (const StateField& f : op->state(spec)) {
      if (f.per == StateField::Per::element)
        fields[f.name] = Values(static_cast<size_t>(spec.numel()), f.initial);
      else
        for (const int64_t n : f.unit_values)
          units[f.name].emplace_back(static_cast<size_t>(n), f.initial);
    }
}

at::Tensor Held::tensor(const std::string& field) const {
  return in_double(fields.at(field), spec.shape);
}

void Held::step(const StepContext& context, const Values& grad, Memory memory) {
  fields["grad"] = grad;
  for (const auto& op : ops) {
    if (op->unit(spec).is_assembled()) {
      const std::vector<UnitPlace> places = unit_places(spec, op->unit(spec));
      for (size_t u = 0; u < places.size(); ++u)
        run_unit(*op, places[u], static_cast<int64_t>(u), context, memory);
      continue;
    }
    const std::vector<FieldUse> uses = op->uses(spec);
    std::vector<Field> views;
    for (const FieldUse& use : uses) {
      Values& values = fields.at(use.name);
      views.push_back({use.name, DType::f32, reinterpret_cast<std::byte*>(values.data()), std::ssize(values)});
    }
    const int64_t n = spec.numel();
    op->run({.tensor = &spec, .index = 0, .place = {0, 1, n, n}, .unit = -1, .row_stride = n,
             .fields = views, .workspace = {}},
            context);
  }
}

void Held::run_unit(const UpdateOp& op, const UnitPlace& place, int64_t unit,
                    const StepContext& context, Memory memory) {
  const bool in_place = memory == Memory::in_place;
  const int64_t stride = in_place ? place.stride : place.columns;
  const int64_t size = (place.rows - 1) * stride + place.columns;
  const int64_t shift = memory == Memory::shifted ? 3 : 0;
  const auto each_row = [&](auto&& row) {
    for (int64_t r = 0; r < place.rows; ++r) row(r, place.first + r * place.stride);
  };
  std::vector<Guarded> copies;
  std::vector<Field> views;
  const std::vector<FieldUse> uses = op.uses(spec);
  const std::vector<StateField> state = op.state(spec);
  copies.reserve(uses.size() + state.size());
  std::map<std::string, Values> before;
  for (const FieldUse& use : uses) {
    Values& values = fields.at(use.name);
    before[use.name] = values;
    std::byte* data = reinterpret_cast<std::byte*>(values.data() + place.first);
    if (!in_place) {
      Guarded& copy = copies.emplace_back(size, shift);
      each_row([&](int64_t r, int64_t at) {
        std::copy_n(values.data() + at, place.columns, copy.data() + r * place.columns);
      });
      data = copy.bytes();
    }
    views.push_back({use.name, DType::f32, data, size});
  }
  for (const StateField& f : state) {
    Values& values = of_unit(f.name, unit);
    Guarded& copy = copies.emplace_back(std::ssize(values), shift);
    std::copy(values.begin(), values.end(), copy.data());
    views.push_back({f.name, DType::f32, copy.bytes(), std::ssize(values)});
  }
  const int64_t bytes = op.workspace_bytes(spec, place);
  Guarded workspace(bytes / static_cast<int64_t>(sizeof(float)), 0);
  std::fill_n(workspace.data(), bytes / static_cast<int64_t>(sizeof(float)), NAN);  // undefined
  op.run({.tensor = &spec, .index = 0, .place = place, .unit = unit, .row_stride = stride,
          .fields = views, .workspace = {workspace.bytes(), static_cast<size_t>(bytes)}},
         context);
  EXPECT_TRUE(workspace.intact()) << "more workspace than asked for";
  for (const Guarded& copy : copies) EXPECT_TRUE(copy.intact()) << "written beside a field";
  for (size_t i = uses.size(); i < views.size(); ++i) {
    Values& values = of_unit(std::string(views[i].name), unit);
    std::copy_n(views[i].f32(), values.size(), values.begin());
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    Values& values = fields.at(uses[i].name);
    Values expected = before.at(uses[i].name);
    each_row([&](int64_t r, int64_t at) {
      const float* row = in_place ? values.data() + at : views[i].f32() + r * place.columns;
      if (uses[i].writes()) std::copy_n(row, place.columns, expected.begin() + at);
      else EXPECT_TRUE(std::equal(row, row + place.columns, expected.begin() + at)) << uses[i].name;
    });
    if (in_place) {
      EXPECT_TRUE(same_bits(values, expected)) << "written beside the unit: " << uses[i].name;
    }
    values = expected;
  }
}

at::Tensor DenseShampoo::root(const at::Tensor& a) const {
  const auto [values, vectors] = torch::linalg_eigh(a / mass, "L");
  const at::Tensor damped = values.clamp_min(0) + options.epsilon * values.max();
  return vectors.matmul(torch::diag(damped.pow(vector ? -0.5 : -0.25))).matmul(vectors.t());
}

at::Tensor DenseShampoo::direction(const at::Tensor& g, int64_t step) {
  const bool sums = options.beta2 == 1;
  const double gain = sums ? 1 : 1 - options.beta2;
  if (step == 1) {
    left = torch::zeros({g.size(0), g.size(0)}, torch::kFloat64);
    right = torch::zeros({g.size(1), g.size(1)}, torch::kFloat64);
    square = torch::zeros_like(g);
    momentum = torch::zeros_like(g);
  }
  left = options.beta2 * left + gain * g.matmul(g.t());
  right = options.beta2 * right + gain * g.t().matmul(g);
  square = options.beta2 * square + gain * g * g;
  mass = sums ? 1 : options.beta2 * mass + gain;
  if (step == 1 || step % options.every == 0) {
    left_root = vector ? torch::eye(1, torch::kFloat64) : root(left);
    right_root = root(right);
  }
  const at::Tensor d = left_root.matmul(g).matmul(right_root);
  const double bias = sums ? 1 : 1 - std::pow(options.beta2, static_cast<double>(step));
  const double least = static_cast<double>(std::min(g.size(0), g.size(1)));
  const double most = std::sqrt(least * mass / gain) / d.norm().item<double>();
  switch (options.grafting) {
    case Grafting::none: return d * std::min(1.0, most);
    case Grafting::sgd: return d * (g.norm() / d.norm());
    case Grafting::rmsprop: return d * ((g / (square / bias).sqrt()).norm() / d.norm());
  }
  return {};
}

at::Tensor DenseShampoo::step(at::Tensor& weight, const at::Tensor& g, int64_t t, double lr,
                              double decay) {
  const at::Tensor d = direction(g, t);
  momentum = options.beta1 * momentum + (1 - options.beta1) * d;
  const double bias = 1 - std::pow(options.beta1, static_cast<double>(t));
  weight = weight - lr * decay * weight - lr / bias * momentum;
  return d;
}

}  // namespace dovetail

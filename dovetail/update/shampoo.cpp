#include "dovetail/update/shampoo.h"

#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"
#include "dovetail/update/matrix_root.h"
#include "dovetail/update/shampoo_tile.h"

namespace dovetail {
namespace {

constexpr std::string_view kShampoo = "shampoo";
constexpr std::string_view kGraft = "graft_sq";
constexpr std::string_view kMomentum = "shampoo_momentum";
constexpr std::string_view kScale = "shampoo_scale";
constexpr std::array<std::string_view, 2> kStatistics = {"shampoo_left", "shampoo_right"};
constexpr std::array<std::string_view, 2> kRoots = {"shampoo_left_root", "shampoo_right_root"};
constexpr float kMost = std::numeric_limits<float>::max();

// Elements whose gradient is not finite keep their average.
DT_VECTOR_CLONES void graft_update(const float* __restrict grad, float* __restrict square,
                                   float scale, float beta2, float gain, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    const float next = beta2 * square[i] + gain * g * g;
    const float held = next < kMost ? next : kMost;
    square[i] = std::fabs(g) <= kMost ? held : square[i];
  }
}

DT_VECTOR_CLONES void apply_momentum(float* __restrict weight, const float* __restrict direction,
                                     float* __restrict momentum, float beta1, float gain,
                                     float decay, float rate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    momentum[i] = beta1 * momentum[i] + gain * direction[i];
    weight[i] -= decay * weight[i] + rate * momentum[i];
  }
}

DT_VECTOR_CLONES void apply_plain(float* __restrict weight, const float* __restrict direction,
                                  float decay, float rate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] -= decay * weight[i] + rate * direction[i];
}

class ShampooOp : public UpdateOp {
 public:
  ShampooOp(const ShampooOptions& options, const ParameterRules& rules)
      : options_(options), rules_(rules) {}
  bool applies_to(const TensorSpec& t) const override { return rules_.selects(kShampoo, t); }
  Unit unit(const TensorSpec&) const override { return {}; }

 protected:
  bool sums() const { return options_.beta2 == 1; }
  double gain() const { return sums() ? 1 : 1 - options_.beta2; }

  const ShampooOptions options_;
  const ParameterRules rules_;
};

class Graft final : public ShampooOp {
 public:
  using ShampooOp::ShampooOp;
  std::string_view name() const override { return "shampoo_graft"; }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{std::string(kGrad), Access::read}, {std::string(kGraft), Access::read_write}};
  }
  std::vector<StateField> state(const TensorSpec&) const override {
    return {{std::string(kGraft), DType::f32, 0}};
  }
  double cost(const TensorSpec&, const UnitPlace& place) const override {
    return 5.0 * static_cast<double>(place.numel());
  }
  void run(const UnitView& view, const StepContext& context) const override {
    const auto grad = view.f32(kGrad), square = view.f32(kGraft);
    graft_update(grad.data(), square.data(), context.grad_scale, static_cast<float>(options_.beta2),
                 static_cast<float>(gain()), std::ssize(grad));
  }
  std::string describe() const override {
    return fmt::format("shampoo_graft beta2={}", options_.beta2);
  }
};

class Precondition final : public ShampooOp {
 public:
  using ShampooOp::ShampooOp;
  std::string_view name() const override { return "shampoo_precondition"; }
  Unit unit(const TensorSpec&) const override {
    return Unit::of_tile(options_.block, options_.block);
  }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    std::vector<FieldUse> fields = {{std::string(kGrad), Access::read_write}};
    if (options_.grafting == Grafting::rmsprop)
      fields.push_back({std::string(kGraft), Access::read});
    return fields;
  }
  std::vector<StateField> state(const TensorSpec& tensor) const override;
  double cost(const TensorSpec& tensor, const UnitPlace& place) const override {
    return shampoo_flops(options_, place.rows, place.columns, has_left(tensor));
  }
  int64_t workspace_bytes(const TensorSpec&, const UnitPlace& place) const override {
    return shampoo_workspace(place.rows, place.columns);
  }
  void run(const UnitView& view, const StepContext& context) const override;
  std::string describe() const override {
    return fmt::format("shampoo_precondition beta2={} epsilon={} block={} every={} grafting={}",
                       options_.beta2, options_.epsilon, options_.block, options_.every,
                       name_of(options_.grafting));
  }

 private:
  static bool has_left(const TensorSpec& tensor) { return tensor.shape.size() >= 2; }
};

std::vector<StateField> Precondition::state(const TensorSpec& tensor) const {
  std::array<std::vector<int64_t>, 2> triangles;
  for (const UnitPlace& p : unit_places(tensor, unit(tensor))) {
    triangles[0].push_back(triangle_values(p.rows));
    triangles[1].push_back(triangle_values(p.columns));
  }
  std::vector<StateField> fields;
  const auto add = [&](std::string_view name, std::vector<int64_t> values) {
    fields.push_back({.name = std::string(name), .per = StateField::Per::unit,
                      .unit_values = std::move(values)});
  };
  for (int s = has_left(tensor) ? 0 : 1; s < 2; ++s) {
    add(kStatistics[s], triangles[s]);
    add(kRoots[s], triangles[s]);
  }
  add(kScale, std::vector<int64_t>(triangles[0].size(), kShampooScaleValues));
  return fields;
}

void Precondition::run(const UnitView& view, const StepContext& context) const {
  const UnitPlace& p = view.place;
  const bool rmsprop = options_.grafting == Grafting::rmsprop;
  ShampooTile tile{.rows = p.rows, .columns = p.columns, .stride = view.row_stride,
                   .grad = view.f32(kGrad).data(),
                   .graft_sq = rmsprop ? view.f32(kGraft).data() : nullptr,
                   .sides = {}, .scale = view.f32(kScale)};
  for (int s = has_left(*view.tensor) ? 0 : 1; s < 2; ++s)
    tile.sides[s] = {.n = s == 0 ? p.rows : p.columns, .statistics = view.f32(kStatistics[s]),
                     .root = view.f32(kRoots[s])};
  precondition(options_, context, tile, view.workspace);
}

class Apply final : public ShampooOp {
 public:
  using ShampooOp::ShampooOp;
  std::string_view name() const override { return "shampoo_apply"; }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    std::vector<FieldUse> fields = {{std::string(kWeight), Access::read_write},
                                    {std::string(kGrad), Access::read}};
    if (options_.beta1 > 0) fields.push_back({std::string(kMomentum), Access::read_write});
    return fields;
  }
  std::vector<StateField> state(const TensorSpec&) const override {
    if (options_.beta1 == 0) return {};
    return {{std::string(kMomentum), DType::f32, 0}};
  }
  double cost(const TensorSpec&, const UnitPlace& place) const override {
    return (options_.beta1 > 0 ? 7.0 : 4.0) * static_cast<double>(place.numel());
  }
  void run(const UnitView& view, const StepContext& context) const override {
    DT_CHECK_GE(context.step, 1, "shampoo");
    const ParameterFactors factors = rules_.factors(*view.tensor);
    const double lr = context.lr * factors.lr_scale, beta1 = options_.beta1;
    const auto weight = view.f32(kWeight), direction = view.f32(kGrad);
    const auto decay = static_cast<float>(lr * factors.weight_decay);
    if (beta1 == 0)
      return apply_plain(weight.data(), direction.data(), decay, static_cast<float>(lr),
                         std::ssize(weight));
    const double rate = lr / (1 - std::pow(beta1, static_cast<double>(context.step)));
    apply_momentum(weight.data(), direction.data(), view.f32(kMomentum).data(),
                   static_cast<float>(beta1), static_cast<float>(1 - beta1), decay,
                   static_cast<float>(rate), std::ssize(weight));
  }
  std::string describe() const override {
    return fmt::format("shampoo_apply beta1={} {}", options_.beta1, rules_.describe());
  }
};

void check(const ShampooOptions& o) {
  if (!(o.beta1 >= 0 && o.beta1 < 1))
    raise<ConfigError>("shampoo: beta1 must be at least 0 and below 1, got {}", o.beta1);
  if (!(o.beta2 >= 0 && o.beta2 <= 1))
    raise<ConfigError>("shampoo: beta2 must be at least 0 and at most 1, got {}", o.beta2);
  if (!(o.epsilon > 0 && o.epsilon < 1))
    raise<ConfigError>("shampoo: epsilon must be above 0 and below 1, got {}", o.epsilon);
  if (o.block < 1 || o.block > 32768)
    raise<ConfigError>("shampoo: block must be 1 to 32768, got {}", o.block);
  if (o.every < 1) raise<ConfigError>("shampoo: every must be at least 1, got {}", o.every);
}

}  // namespace

std::string_view name_of(Grafting grafting) {
  switch (grafting) {
    case Grafting::none: return "none";
    case Grafting::sgd: return "sgd";
    case Grafting::rmsprop: return "rmsprop";
  }
  return {};
}

Grafting parse_grafting(std::string_view name) {
  for (const Grafting g : {Grafting::none, Grafting::sgd, Grafting::rmsprop})
    if (name == name_of(g)) return g;
  raise<ConfigError>("shampoo: grafting must be none, sgd or rmsprop, got \"{}\"", name);
}

bool shampoo_takes_roots(const ShampooOptions& options, int64_t step) {
  return step == 1 || step % options.every == 0;
}

UpdateOps make_shampoo(const ShampooOptions& options, const ParameterRules& rules) {
  check(options);
  UpdateOps ops;
  if (options.grafting == Grafting::rmsprop) ops.push_back(std::make_shared<Graft>(options, rules));
  ops.push_back(std::make_shared<Precondition>(options, rules));
  ops.push_back(std::make_shared<Apply>(options, rules));
  return ops;
}

}  // namespace dovetail

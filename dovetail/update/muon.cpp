#include "dovetail/update/muon.h"

#include <algorithm>
#include <cmath>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr std::string_view kMuon = "muon";
constexpr std::string_view kMomentum = "momentum";

DT_VECTOR_CLONES void momentum_update(float* __restrict grad, float* __restrict buffer, float scale,
                                      float momentum, float gain, bool nesterov, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = grad[i] * scale;
    const float m = momentum * buffer[i] + gain * g;
    buffer[i] = m;
    grad[i] = nesterov ? momentum * m + gain * g : m;
  }
}

DT_VECTOR_CLONES void apply_update(float* __restrict weight, const float* __restrict direction,
                                   float keep, float rate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) weight[i] = keep * weight[i] - rate * direction[i];
}

class MuonOp : public UpdateOp {
 public:
  MuonOp(const MuonOptions& options, const ParameterRules& rules)
      : options_(options), rules_(rules) {}
  bool applies_to(const TensorSpec& t) const override { return rules_.selects(kMuon, t); }
  std::vector<StateField> state(const TensorSpec&) const override { return {}; }
  Unit unit(const TensorSpec&) const override { return {}; }
  double cost(const TensorSpec&, const UnitPlace& place) const override {
    return 6.0 * static_cast<double>(place.numel());
  }

 protected:
  const MuonOptions options_;
  const ParameterRules rules_;
};

class Momentum final : public MuonOp {
 public:
  using MuonOp::MuonOp;
  std::string_view name() const override { return "muon_momentum"; }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{std::string(kGrad), Access::read_write}, {std::string(kMomentum), Access::read_write}};
  }
  std::vector<StateField> state(const TensorSpec&) const override {
    return {{std::string(kMomentum), DType::f32, 0}};
  }
  void run(const UnitView& view, const StepContext& context) const override {
    const auto grad = view.f32(kGrad), buffer = view.f32(kMomentum);
    momentum_update(grad.data(), buffer.data(), context.grad_scale,
                    static_cast<float>(options_.momentum),
                    static_cast<float>(1 - options_.momentum), options_.nesterov, std::ssize(grad));
  }
  std::string describe() const override {
    return fmt::format("muon_momentum momentum={} nesterov={}", options_.momentum,
                       options_.nesterov);
  }
};

class Orthogonalize final : public MuonOp {
 public:
  using MuonOp::MuonOp;
  std::string_view name() const override { return "muon_orthogonalize"; }
  Unit unit(const TensorSpec& t) const override { return muon_unit(options_, t); }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{.name = std::string(kGrad), .access = Access::read_write, .travels_as_bf16 = true}};
  }
  double cost(const TensorSpec&, const UnitPlace& p) const override {
    return newton_schulz_flops(p.rows, p.columns, options_.iteration.steps);
  }
  int64_t workspace_bytes(const TensorSpec&, const UnitPlace& p) const override {
    return newton_schulz_workspace(p.rows, p.columns);
  }
  void run(const UnitView& view, const StepContext&) const override {
    orthogonalize(view.f32(kGrad).data(), view.place.rows, view.place.columns, view.row_stride,
                  options_.iteration, view.workspace);
  }
  std::string describe() const override {
    const NewtonSchulz& k = options_.iteration;
    return fmt::format("muon_orthogonalize unit={} a={} b={} c={} steps={}", options_.unit, k.a,
                       k.b, k.c, k.steps);
  }
};

class Apply final : public MuonOp {
 public:
  using MuonOp::MuonOp;
  std::string_view name() const override { return "muon_apply"; }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{std::string(kWeight), Access::read_write}, {std::string(kGrad), Access::read}};
  }
  void run(const UnitView& view, const StepContext& context) const override {
    const TensorSpec& t = *view.tensor;
    const std::vector<UnitPlace> places = unit_places(t, muon_unit(options_, t));
    const Interval own = view.elements();
    const bool alike = std::all_of(places.begin(), places.end(), [&](const UnitPlace& p) {
      return p.rows == places[0].rows && p.columns == places[0].columns;
    });
    if (places.empty()) return;
    if (alike) return apply(view, own, places[0], context);
    for (const UnitPlace& p :
         places)  // units of several shapes: each run of elements with its own scale
      for (Interval run : p.runs(p.packed_in(own))) apply(view, run, p, context);
  }
  std::string describe() const override {
    return fmt::format("muon_apply scale={} {}", name_of(options_.scale), rules_.describe());
  }

 private:
  void apply(const UnitView& view, Interval run, const UnitPlace& p,
             const StepContext& context) const {
    const ParameterFactors factors = rules_.factors(*view.tensor);
    const double lr = context.lr * factors.lr_scale;
    const int64_t at = run.begin - view.place.first;
    apply_update(view.f32(kWeight).data() + at, view.f32(kGrad).data() + at,
                 static_cast<float>(1 - lr * factors.weight_decay),
                 static_cast<float>(lr * muon_scale(options_.scale, p.rows, p.columns)),
                 run.size());
  }
};

}  // namespace

std::string_view name_of(MuonScale scale) {
  return scale == MuonScale::original ? "original" : "match_rms_adamw";
}

MuonScale parse_muon_scale(std::string_view name) {
  if (name == "original") return MuonScale::original;
  if (name == "match_rms_adamw") return MuonScale::match_rms_adamw;
  raise<ConfigError>("muon: scale: wanted original or match_rms_adamw, got \"{}\"", name);
}

float muon_scale(MuonScale scale, int64_t rows, int64_t columns) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  return static_cast<float>(scale == MuonScale::original ? std::sqrt(std::max(1.0, r / c))
                                                         : 0.2 * std::sqrt(std::max(r, c)));
}

Unit muon_unit(const MuonOptions& options, const TensorSpec& t) {
  const auto named = [&](const TensorNodes& n) { return n.name == options.unit; };
  const bool has = std::any_of(t.nodes.begin(), t.nodes.end(), named) ||
                   (options.unit == "head" && t.heads > 0) ||
                   (options.unit == "expert" && t.kind == ParamKind::expert);
  return has ? Unit::of_node(options.unit) : Unit::of_matrix();
}

UpdateOps make_muon(const MuonOptions& options, const ParameterRules& rules) {
  if (!(options.momentum >= 0 && options.momentum < 1))
    raise<ConfigError>("muon: momentum must be at least 0 and below 1, got {}", options.momentum);
  if (options.iteration.steps < 1 || options.iteration.steps > 100)
    raise<ConfigError>("muon: steps must be 1 to 100, got {}", options.iteration.steps);
  for (double k : {options.iteration.a, options.iteration.b, options.iteration.c})
    if (!std::isfinite(k)) raise<ConfigError>("muon: coefficients must be finite, got {}", k);
  if (options.unit.empty())
    raise<ConfigError>("muon: unit must be matrix or the name of nodes, got \"\"");
  return {std::make_shared<Momentum>(options, rules),
          std::make_shared<Orthogonalize>(options, rules), std::make_shared<Apply>(options, rules)};
}

}  // namespace dovetail

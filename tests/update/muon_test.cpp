#include "dovetail/update/muon.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "dovetail/base/error.h"
#include "dovetail/update/optimizer.h"

namespace dovetail {
namespace {

struct Aligned {
  explicit Aligned(int64_t bytes) : memory(at::empty({bytes + 64}, at::kByte)) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data_ptr());
    span = {static_cast<std::byte*>(memory.data_ptr()) + (64 - address % 64) % 64,
            static_cast<size_t>(bytes)};
  }
  at::Tensor memory;
  std::span<std::byte> span;
};

at::Tensor orthogonal(const at::Tensor& g, const NewtonSchulz& k = {},
                      Bf16Products products = bf16_products()) {
  at::Tensor x = g.clone(at::MemoryFormat::Contiguous);
  Aligned workspace(newton_schulz_workspace(g.size(0), g.size(1)));
  orthogonalize(x.data_ptr<float>(), g.size(0), g.size(1), g.size(1), k, workspace.span, products);
  return x;
}

at::Tensor random_matrix(int64_t rows, int64_t columns, uint64_t seed) {
  return at::randn({rows, columns}, at::detail::createCPUGenerator(seed));
}

// The iteration in double; `rounds`: with every product rounded to bf16, as the definition says.
at::Tensor reference(const at::Tensor& g, const NewtonSchulz& k, bool rounds) {
  auto round = [&](const at::Tensor& t) {
    return rounds ? t.to(at::kFloat).to(at::kBFloat16).to(at::kDouble) : t;
  };
  at::Tensor x = g.to(at::kDouble);
  x = round(x / x.norm());
  const bool tall = g.size(0) > g.size(1);
  if (tall) x = x.t().contiguous();
  for (int i = 0; i < k.steps; ++i) {
    const at::Tensor a = round(x.mm(x.t()));
    const at::Tensor b = round(k.b * a + k.c * a.mm(a));
    x = round(k.a * x + b.mm(x));
  }
  return tall ? x.t().contiguous() : x;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}

TEST(NewtonSchulz, EqualsItsDefinitionAndFp64WithinBf16) {
  for (auto [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {64, 64}, {64, 200}, {300, 64}, {1, 7}, {7, 1}, {130, 131}, {520, 700}, {1100, 530}}) {
    const at::Tensor g = random_matrix(rows, columns, rows * 1000 + columns);
    const at::Tensor exact = reference(g, {}, false), rounded = reference(g, {}, true);
    const double own_error = distance(rounded, exact);  // that of bf16 itself
    for (Bf16Products products : {Bf16Products::widened, Bf16Products::native}) {
      const at::Tensor x = orthogonal(g, {}, products);
      EXPECT_LE(distance(x, exact), 1.1 * own_error + 1e-3) << rows << " x " << columns;
      EXPECT_LE(distance(x, rounded), 0.5 * own_error + 4e-3) << rows << " x " << columns;
      EXPECT_TRUE(at::equal(x, x.to(at::kBFloat16).to(at::kFloat)));
    }
    const at::Tensor singular = at::linalg_svdvals(orthogonal(g));
    EXPECT_GT(singular.min().item<float>(), 0.3f) << rows << " x " << columns;
    EXPECT_LT(singular.max().item<float>(), 1.35f) << rows << " x " << columns;
  }
}

TEST(NewtonSchulz, ScaleDoesNotMatter) {
  const at::Tensor g = random_matrix(40, 90, 3), x = orthogonal(g);
  for (float scale : {0x1p-100f, 0x1p-64f, 0x1p100f, 0x1p90f})
    EXPECT_TRUE(at::equal(x, orthogonal(g * scale))) << scale;
  for (float scale : {1e-30f, 3e-7f, 1e30f})
    EXPECT_LE(distance(orthogonal(g * scale), x), 0.02) << scale;
}

TEST(NewtonSchulz, ZerosStayAndBadValuesAreNotHidden) {
  EXPECT_TRUE(at::equal(orthogonal(at::zeros({8, 12})), at::zeros({8, 12})));
  at::Tensor one = at::zeros({8, 12});
  one[3][4] = std::numeric_limits<float>::denorm_min();
  EXPECT_TRUE(orthogonal(one).isfinite().all().item<bool>());
  EXPECT_GT(orthogonal(one)[3][4].item<float>(), 0.5f);
  for (float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    at::Tensor g = random_matrix(8, 12, 1);
    g[7][11] = bad;
    EXPECT_TRUE(orthogonal(g).isnan().all().item<bool>());
  }
  Aligned none(0);
  orthogonalize(nullptr, 0, 5, 5, {}, none.span);
}

TEST(NewtonSchulz, WhereTheMatrixLiesDoesNotMatter) {
  const at::Tensor wide = random_matrix(70, 200, 9);
  at::Tensor part = wide.slice(1, 37, 37 + 90);
  const at::Tensor packed = orthogonal(part.contiguous());
  Aligned workspace(newton_schulz_workspace(70, 90));
  const at::Tensor before = wide.clone();
  orthogonalize(wide.data_ptr<float>() + 37, 70, 90, 200, {}, workspace.span);
  EXPECT_TRUE(at::equal(part, packed));
  EXPECT_TRUE(at::equal(wide.slice(1, 0, 37), before.slice(1, 0, 37)));
  EXPECT_TRUE(at::equal(wide.slice(1, 127), before.slice(1, 127)));
}

// A whole parameter under the three operations.
struct Trained {
  Trained(MuonOptions options, TensorSpec tensor, double weight_decay, float lr_scale = 1)
      : spec(std::move(tensor)) {
    RuleOptions rules;
    rules.weight_decay = weight_decay;
    rules.rules = {{.pattern = "*", .lr_scale = lr_scale}};
    ops = make_muon(options, ParameterRules(rules));
    weight = at::sin(at::arange(spec.numel(), at::kDouble)).to(at::kFloat);
    momentum = at::zeros({spec.numel()});
  }

  void step(const at::Tensor& gradient, const StepContext& context) {
    grad = gradient.flatten().clone();
    for (const auto& op : ops) {
      const Unit unit = op->unit(spec);
      const int64_t n = spec.numel();
      std::vector<UnitPlace> places{{0, 1, n, n}};
      if (unit.is_assembled()) places = unit_places(spec, unit);
      for (size_t u = 0; u < places.size(); ++u) {
        std::vector<Field> fields;
        const std::vector<FieldUse> uses = op->uses(spec);  // whose names the fields refer to
        for (const FieldUse& use : uses) {
          at::Tensor& t = use.name == kWeight ? weight : use.name == kGrad ? grad : momentum;
          fields.push_back({use.name, DType::f32,
                            reinterpret_cast<std::byte*>(t.data_ptr<float>() + places[u].first),
                            places[u].span().size()});
        }
        Aligned workspace(op->workspace_bytes(spec, places[u]));
        op->run({&spec, 0, places[u], unit.is_assembled() ? static_cast<int64_t>(u) : -1,
                 places[u].stride, fields, workspace.span},
                context);
      }
    }
  }

  TensorSpec spec;
  UpdateOps ops;
  at::Tensor weight, grad, momentum;
};

std::vector<double> torch_muon(int64_t rows, int64_t columns, int steps, bool nesterov,
                               const std::string& scale) {
  const std::string command =
      fmt::format("{0}/.venv/bin/python {0}/tests/update/torch_muon.py {1} {2} {3} {4} {5}",
                  DOVETAIL_SOURCE_DIR, rows, columns, steps, nesterov ? 1 : 0, scale);
  std::vector<double> values;
  FILE* pipe = popen(command.c_str(), "r");
  for (double v; pipe && std::fscanf(pipe, "%lf", &v) == 1;) values.push_back(v);
  if (pipe) {
    EXPECT_EQ(pclose(pipe), 0);
  }
  return values;
}

TEST(Muon, AgreesWithTorchOptimMuon) {
  for (auto [rows, columns, nesterov, scale] :
       std::vector<std::tuple<int64_t, int64_t, bool, std::string>>{
           {48, 80, true, "original"},
           {96, 40, true, "match_rms_adamw"},
           {33, 50, false, "original"}}) {
    constexpr int kSteps = 4;
    const std::vector<double> wanted = torch_muon(rows, columns, kSteps, nesterov, scale);
    ASSERT_EQ(std::ssize(wanted), rows * columns);
    MuonOptions options{.nesterov = nesterov, .scale = parse_muon_scale(scale)};
    Trained p(options, {.name = "w", .shape = {rows, columns}}, 0.1);
    const at::Tensor start = p.weight.clone(), index = at::arange(rows * columns, at::kDouble);
    for (int step = 1; step <= kSteps; ++step) {
      const at::Tensor noise = at::sin(index * 1.7 + step) * 43758.5453;
      p.step((noise - at::floor(noise) - 0.5).to(at::kFloat), {.step = step, .lr = 0.02f});
    }
    const at::Tensor reference = torch::tensor(wanted, at::kDouble);
    // Two correct iterations in bf16 differ by a few percent of the change that they make
    // (baselines: 1 to 10).
    EXPECT_LE(distance(p.weight - start, reference - start), 0.05) << rows << " x " << columns;
  }
}

TEST(Muon, FormulasOfMomentumScaleAndDecay) {
  MuonOptions options{.momentum = 0.5, .nesterov = true, .scale = MuonScale::original};
  Trained p(options, {.name = "w", .shape = {8, 2}}, 0.25, 2);
  const at::Tensor before = p.weight.clone(), g = random_matrix(8, 2, 4);
  p.step(g, {.step = 1, .lr = 0.1f, .grad_scale = 0.5f});
  EXPECT_LE(distance(p.momentum, (0.25 * g).flatten()), 1e-6);
  const at::Tensor direction = orthogonal(0.5 * 0.25 * g + 0.25 * g);
  const at::Tensor wanted =
      before * (1 - 0.2 * 0.25) - 0.2 * 2.0 * direction.flatten();  // sqrt(8 / 2) = 2
  EXPECT_LE(distance(p.weight, wanted), 1e-6);
  EXPECT_FLOAT_EQ(muon_scale(MuonScale::match_rms_adamw, 100, 400), 0.2f * 20);
  EXPECT_FLOAT_EQ(muon_scale(MuonScale::original, 100, 400), 1);
}

TEST(Muon, UnitsOfSeveralShapesHaveTheirOwnScale) {
  MuonOptions options{
      .momentum = 0, .nesterov = false, .scale = MuonScale::match_rms_adamw, .unit = "qkv"};
  TensorSpec spec{.name = "qkv", .shape = {24, 16}};
  spec.nodes = {{"qkv", 0, {0, 12, 18, 24}}};
  Trained p(options, spec, 0);
  const at::Tensor before = p.weight.clone(), g = random_matrix(24, 16, 4);
  p.step(g, {.step = 1, .lr = 0.1f});
  at::Tensor wanted = before.view({24, 16}).clone();
  for (auto [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, 12}, {12, 18}, {18, 24}})
    wanted.slice(0, begin, end) -= 0.1 * 0.2 * 4 * orthogonal(g.slice(0, begin, end).contiguous());
  EXPECT_LE(distance(p.weight.view({24, 16}), wanted), 1e-6);
}

TEST(Muon, ExpertsConvolutionsAndNodesAreUnits) {
  const TensorSpec experts{.name = "e", .shape = {3, 8, 12}, .kind = ParamKind::expert};
  const TensorSpec conv{.name = "c", .shape = {6, 4, 3, 3}, .kind = ParamKind::conv};
  const TensorSpec heads{.name = "h", .shape = {16, 20}, .heads = 4, .heads_dim = 1};
  EXPECT_EQ(unit_places(experts, muon_unit({}, experts)).size(), 3u);
  EXPECT_EQ(unit_places(experts, muon_unit({}, experts))[1], (UnitPlace{96, 8, 12, 12}));
  EXPECT_EQ(unit_places(conv, muon_unit({}, conv)), (std::vector<UnitPlace>{{0, 6, 36, 36}}));
  EXPECT_EQ(unit_places(heads, muon_unit({}, heads)).size(), 1u);
  EXPECT_EQ(unit_places(heads, muon_unit({.unit = "head"}, heads))[3], (UnitPlace{15, 16, 5, 20}));
  EXPECT_EQ(unit_places(conv, muon_unit({.unit = "head"}, conv)).size(), 1u);
}

TEST(Muon, BadOptionsAreNamed) {
  const ParameterRules rules{RuleOptions{}};
  EXPECT_THROW(make_muon({.momentum = 1}, rules), ConfigError);
  EXPECT_THROW(make_muon({.iteration = {.steps = 0}}, rules), ConfigError);
  EXPECT_THROW(make_muon({.iteration = {.a = std::nan("")}}, rules), ConfigError);
  EXPECT_THROW(make_muon({.unit = ""}, rules), ConfigError);
  EXPECT_THROW(parse_muon_scale("rms"), ConfigError);
}

TEST(Muon, EveryOptionIsInTheDescription) {
  auto text = [](MuonOptions o) {
    return describe(make_muon(o, ParameterRules({.weight_decay = 0.1})));
  };
  std::vector<std::string> all{text({}),
                               text({.momentum = 0.9}),
                               text({.nesterov = false}),
                               text({.iteration = {.a = 3}}),
                               text({.iteration = {.b = 3}}),
                               text({.iteration = {.c = 3}}),
                               text({.iteration = {.steps = 6}}),
                               text({.scale = MuonScale::original}),
                               text({.unit = "head"})};
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
}

}  // namespace
}  // namespace dovetail

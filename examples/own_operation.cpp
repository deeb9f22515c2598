// An update operation of one's own: NorMuon, which divides each row of Muon's orthogonalised update
// by the running root mean square of that row, so that all neurons learn alike. It knows nothing of
// ranks: rows are never cut, and one and four ranks come to the same bits.
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <cmath>
#include <set>

#include "dovetail/comm/threads/spawn.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/common/init.h"
#include "dovetail/ops/unit.h"
#include "dovetail/update/optimizer.h"

using namespace dovetail;

struct NormalizeRows final : UpdateOp {
  explicit NormalizeRows(float beta) : beta(beta) {}
  std::string_view name() const override { return "normalize_rows"; }
  bool applies_to(const TensorSpec& t) const override { return t.kind == ParamKind::matrix; }
  Unit unit(const TensorSpec&) const override { return Unit::of_row(); }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{"grad", Access::read_write}, {"row_sq", Access::read_write}};
  }
  std::vector<StateField> state(const TensorSpec& t) const override {  // one value a row
    return {{.name = "row_sq", .per = StateField::Per::block, .block = t.row()}};
  }
  double cost(const TensorSpec&, const UnitPlace& p) const override { return 4.0 * p.numel(); }
  void run(const UnitView& view, const StepContext& context) const override {
    const auto update = view.f32("grad"), row_sq = view.f32("row_sq");
    const size_t columns = view.tensor->row();
    const float warm = 1 - std::pow(beta, static_cast<float>(context.step));
    for (size_t r = 0; r < row_sq.size(); ++r) {
      const auto row = update.subspan(r * columns, columns);
      float sum = 0;
      for (float v : row) sum += v * v;
      row_sq[r] = beta * row_sq[r] + (1 - beta) * sum / columns;
      for (float& v : row) v /= std::sqrt(row_sq[r] / warm) + 1e-8f;
    }
  }
  std::string describe() const override { return fmt::format("normalize_rows beta={}", beta); }
  const float beta;
};

struct Net : torch::nn::Module {
  Net() : weight(register_parameter("weight", at::empty({24, 32}))) {}
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
  at::Tensor weight;
};

// Fits a linear map to the first 24 of 32 numbers. All ranks see the same samples here: sums of
// equal gradients over ranks are exact, and the results can be compared to the last bit.
double train(comm::Group& world) {
  auto net = std::make_shared<ops::Unit<Net>>();
  models::fill_normal(net->weight, 0.1, /*seed=*/1, "weight");
  UpdateOps ops = make_optimizer({.name = "muon"}, {});
  ops.insert(ops.end() - 1, std::make_shared<NormalizeRows>(0.95f));  // before muon_apply
  EngineOptions options;
  options.plan.degrees = {world.size(), world.size(), world.size()};
  Engine engine(net, {std::shared_ptr<void>(), &world}, options, ops);
  double norm = 0;
  for (uint64_t step = 1; step <= 10; ++step) {
    const at::Tensor x = at::empty({8, 32});
    models::fill_normal(x, 1, step, "samples");
    (net->forward(x) - x.slice(1, 0, 24)).pow(2).sum().backward();
    norm = engine.step(/*lr=*/0.01f, 1.0 / (8 * world.size())).grad_norm;
  }
  return norm;
}

int main() {
  std::set<double> norms;
  for (int ranks : {1, 4})
    comm::spawn(ranks, [&](comm::Group& world) {
      const double norm = train(world);
      if (world.rank() != 0) return;
      fmt::print("{} rank(s): gradient norm at step 10 {:.17g}\n", ranks, norm);
      norms.insert(norm);
    });
  return norms.size() == 1 ? 0 : 1;
}

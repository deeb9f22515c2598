// An update operation of one's own, with no word about ranks: NorMuon divides each row of Muon's orthogonalised update
// by the running root mean square of that row. One and four ranks come to the same bits.
#include <fmt/format.h>
#include <cmath>

#include "dovetail/comm/threads/spawn.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/common/init.h"
#include "dovetail/ops/linear.h"
#include "dovetail/ops/unit.h"
#include "dovetail/update/optimizer.h"

using namespace dovetail;
struct NormalizeRows final : UpdateOp {
  std::string_view name() const override { return "normalize_rows"; }
  bool applies_to(const TensorSpec& t) const override { return t.kind == ParamKind::matrix; }
  Unit unit(const TensorSpec&) const override { return Unit::of_row(); }
  std::vector<FieldUse> uses(const TensorSpec&) const override {
    return {{"grad", Access::read_write}, {"row_sq", Access::read_write}};
  }
  std::vector<StateField> state(const TensorSpec& t) const override {  // one value a row
    return {{.name = "row_sq", .per = StateField::Per::block, .block = t.row()}};
  }
  double cost(const TensorSpec&, const UnitPlace& place) const override { return 4.0 * place.numel(); }
  void run(const UnitView& view, const StepContext& context) const override {
    const auto update = view.f32("grad"), row_sq = view.f32("row_sq");
    for (size_t r = 0, n = view.tensor->row(); r < row_sq.size(); ++r) {
      float sum = 0;
      for (float v : update.subspan(r * n, n)) sum += v * v;
      row_sq[r] = 0.95f * row_sq[r] + 0.05f * sum / n;
      const float rms = std::sqrt(row_sq[r] / (1 - std::pow(0.95f, context.step)));
      for (float& v : update.subspan(r * n, n)) v /= rms + 1e-8f;
    }
  }
  std::string describe() const override { return "normalize_rows beta=0.95 eps=1e-8"; }
};

int main() {
  std::vector<double> norms;
  for (int ranks : {1, 4})
    comm::spawn(ranks, [&](comm::Group& world) {
      auto net = std::make_shared<ops::Unit<ops::Linear>>(32, 24, /*bias=*/false);
      models::fill_normal(net->weight, 0.1, /*seed=*/1, "weight");
      UpdateOps ops = make_optimizer({.name = "muon"}, {});
      ops.insert(ops.end() - 1, std::make_shared<NormalizeRows>());  // before muon_apply
      EngineOptions options;
      options.plan.degrees = {ranks, ranks, ranks};
      Engine engine(net, {std::shared_ptr<void>(), &world}, options, ops);
      for (uint64_t step = 1; step <= 10; ++step) {  // equal samples on all ranks, so that sums over them are exact
        at::Tensor x = at::empty({8, 32});
        models::fill_normal(x, 1, step, "samples");
        (net->forward(x) - x.slice(1, 0, 24)).pow(2).sum().backward();
        const double norm = engine.step(/*lr=*/0.01f, 1.0 / (8 * ranks)).grad_norm;
        if (step == 10 && world.rank() == 0) norms.push_back(norm);
      }
    });
  fmt::print("gradient norm at step 10: {:.17g} on one rank, {:.17g} on four\n", norms[0], norms[1]);
  return norms[0] == norms[1] ? 0 : 1;
}

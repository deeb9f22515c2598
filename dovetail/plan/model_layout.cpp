#include "dovetail/plan/model_layout.h"

#include <algorithm>
#include <chrono>

#include "dovetail/plan/orientation.h"

namespace dovetail::plan {
namespace {

double ratio_over(int64_t planned, int64_t numel) {
  return numel == 0 ? 0 : double(planned) / double(numel) - 1;
}

// Sum over the model of degree * shard(group), over its elements.
template <class Shard>
double model_padding(const ModelLayout& m, int64_t degree, Shard shard) {
  int64_t planned = 0, numel = 0;
  for (const GroupLayout& g : m.groups) {
    planned += g.repeat * degree * shard(g.layout);
    numel += g.repeat * g.numel;
  }
  return ratio_over(planned, numel);
}

int64_t degree_of(const ElementLayout& l, int level) {
  return l.segments.empty() ? 1 : level == 1 ? l.segments[0].zero1 : l.segments[0].zero3;
}

}  // namespace

double GroupLayout::padding3() const {
  return ratio_over(degree_of(layout, 3) * layout.shard3(), numel);
}
double GroupLayout::padding1() const {
  return ratio_over(degree_of(layout, 1) * layout.shard1(), numel);
}

double ModelLayout::padding3() const {
  return model_padding(*this, degrees.zero3, [](const ElementLayout& l) { return l.shard3(); });
}
double ModelLayout::padding1() const {
  return model_padding(*this, degrees.zero1, [](const ElementLayout& l) { return l.shard1(); });
}
double ModelLayout::bound_padding1() const {
  return model_padding(*this, degrees.zero1, [](const ElementLayout& l) { return l.bound1; });
}
bool ModelLayout::exact() const {
  return std::all_of(groups.begin(), groups.end(),
                     [](const GroupLayout& g) { return g.layout.exact; });
}

LayoutRequest request_of(const std::vector<TensorSpec>& tensors,
                         const ModelLayoutOptions& options) {
  LayoutRequest r;
  r.degrees = options.degrees;
  r.alignment = options.alignment;
  r.max_segments = options.max_segments;
  for (const TensorSpec& t : tensors)
    r.tensors.push_back({t.name, t.numel(), block_elements(t, options.block), {}});
  return r;
}

ModelLayout lay_out_model(const Inventory& model, const ModelLayoutOptions& options) {
  ModelLayout r{model.name, options.degrees, {}, 0};
  const int64_t base = options.orient ? base_length(model) : 0;
  for (const InventoryGroup& g : model.groups) {
    const auto start = std::chrono::steady_clock::now();
    GroupLayout group{g.name, g.repeat, g.numel(), g.tensors, {}, 0};
    if (options.orient)
      group.tensors = split_experts(oriented(std::move(group.tensors), base, options.alignment),
                                    options.block);
    group.layout = lay_out(request_of(group.tensors, options));
    group.milliseconds =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    r.milliseconds += group.milliseconds;
    r.groups.push_back(std::move(group));
  }
  return r;
}

}  // namespace dovetail::plan

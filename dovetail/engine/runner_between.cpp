// What a runner does between passes: gradients that are given or dropped, parameters that stay gathered, the order of
// units.
#include <algorithm>

#include "dovetail/base/error.h"
#include "dovetail/engine/runner.h"

namespace dovetail::engine_detail {

void Runner::check_idle(const char* call) {
  leave_broken_backward();
  if (failed_)
    raise<StateError>("engine: {} after a pass that failed; build a new engine and load the last checkpoint", call);
  if (in_backward_) raise<StateError>("engine: {} inside of a backward pass", call);
}

bool Runner::in_backward() {
  leave_broken_backward();
  return in_backward_;
}

// autograd calls nobody back where a function of the graph threw, but drops what it would have called. What was reduced
// until then is part of a gradient, as elsewhere in torch; what was not is dropped.
void Runner::leave_broken_backward() {
  if (failed_ || !in_backward_ || !callback_.expired()) return;
  failed_ = true;  // until all has gone well
  ++broken_backwards_;
  trace_backward(-1);
  context_.trace.reset();
  finish_reductions(0);
  for (auto& group : groups_) {
    group->abandon_gradient();
    if (!all_gathered_) group->release();
  }
  for (GroupRun& run : runs_) run.forward_uses = 0;
  depth_ = 0;
  end_pass();
  restore_pools();
  in_backward_ = graph_wanted_ = after_graph_ = failed_ = false;
}

void Runner::set_sync(bool sync) {
  check_idle("set_gradient_sync");
  if (!sync && context_.degrees().zero2 > 1 && !context_.plan.options.local_accumulation)
    raise<ConfigError>("set_gradient_sync(false): wanted plan option local_accumulation with zero2 {}, got none",
                       context_.degrees().zero2);
  sync_ = sync;
}

void Runner::inject(const std::function<void(ShardGroup&)>& fill) {
  check_idle("inject_gradients");
  for (GroupRun& run : runs_) run.used = true;
  for (int64_t g : reduce_order()) {
    fill(*groups_[g]);
    launch_reduction(g);
  }
  finish_reductions(0);
}

void Runner::complete_gradients() {
  const TraceScope traced(context_.trace.get(), Doing::reduce, "reduce main gradients");
  for (auto& group : groups_) group->reduce_main();
}

void Runner::drop_gradients() {
  for (auto& group : groups_) group->drop_gradient();
  for (GroupRun& run : runs_) run.used = false;
  observed_.clear();
}

void Runner::gather(int64_t g) {
  check_idle("gather");
  // A refresh lets all groups go.
  const bool none = std::all_of(groups_.begin(), groups_.end(),
                                [](const auto& group) { return group->residence() == Residence::released; });
  if (none && depth_ == 0) refresh();
  if (groups_.at(g)->residence() == Residence::released) groups_[g]->start_gather(/*backward=*/false);
  groups_[g]->finish_gather();
}

void Runner::release(int64_t g) {
  check_idle("release");
  if (all_gathered_) raise<StateError>("engine: release of {} while all are gathered", groups_.at(g)->title());
  groups_.at(g)->release();
}

void Runner::gather_all() {
  check_idle("gather_all");
  if (stale_ || exposed_) refresh();
  all_gathered_ = true;
  gather_groups();
}

void Runner::gather_groups() {
  for (auto& group : groups_) {
    if (group->residence() == Residence::released) group->start_gather(/*backward=*/false);
    group->finish_gather();
  }
}

void Runner::release_all() {
  check_idle("release_all");
  all_gathered_ = false;
  for (auto& group : groups_) group->release();
  end_pass();
  restore_pools();
}

void Runner::reduce_when_written(int64_t g) {
  DT_CHECK(!root_is(g), "the root is reduced last");
  runs_[g].when_written = true;
  // Until a backward pass has shown that it comes earlier, it is reduced after all others: nothing waits for it.
  std::erase(order_, g);
  order_.insert(order_.begin(), g);
}

std::vector<int64_t> Runner::observed_order() const {
  std::vector<int64_t> order;
  for (int64_t g : observed_)
    if (!root_is(g) && !runs_[g].when_written) order.push_back(g);
  for (int64_t g : order_)  // unused ones keep their places relative to one another, at the end
    if (!runs_[g].when_written && std::find(order.begin(), order.end(), g) == order.end()) order.push_back(g);
  // Reductions go backwards through it: behind the first of those that were ready later.
  for (int64_t g : order_) {
    if (!runs_[g].when_written) continue;
    auto place = order.begin();
    const auto own = runs_[g].done_again ? arrived_.end() : std::find(arrived_.begin(), arrived_.end(), g);
    for (auto later = own; later != arrived_.end(); ++later)
      if (const auto at = std::find(order.begin(), order.end(), *later); at != order.end()) {
        place = at + 1;
        break;
      }
    order.insert(place, g);
  }
  return order;
}

void Runner::adopt_order(const std::vector<int64_t>& order, const std::vector<std::vector<std::byte>>& all,
                         size_t at) {
  DT_CHECK_EQ(order.size(), order_.size());
  const auto mine = std::as_bytes(std::span(order));
  for (const auto& theirs : all)
    if (!std::ranges::equal(std::span(theirs).subspan(at), mine)) return;
  order_ = order;
}

}  // namespace dovetail::engine_detail

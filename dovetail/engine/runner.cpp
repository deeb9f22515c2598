#include "dovetail/engine/runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "dovetail/base/error.h"
#include "dovetail/engine/backward_node.h"
#include "dovetail/engine/gradient_move.h"
#include "dovetail/plan/schedule.h"

namespace dovetail::engine_detail {

namespace {

bool has_plain_bucket(const plan::Plan& plan) {
  for (const plan::GroupPlan& group : plan.groups)
    for (const plan::BucketPlan& bucket : group.buckets)
      if (plan::format_named(bucket.format).is_plain(plan.options.main)) return true;
  return false;
}

}  // namespace

Runner::Runner(Context& context)
    : context_(context), in_place_(plan::shares_memory(context.plan, plan::RankGroup::gather)),
      peers_read_main_(in_place_ && has_plain_bucket(context.plan)) {
  const int64_t count = std::ssize(context.plan.groups);
  for (int64_t g = 0; g < count; ++g) groups_.push_back(std::make_unique<ShardGroup>(context, g));
  runs_.resize(count);
  for (int64_t g = 0; g + 1 < count; ++g) order_.push_back(g);
  make_gather_slots();
}

// Forward.

void Runner::before_forward(int64_t g, std::span<at::Tensor* const> inputs) {
  leave_broken_backward();
  if (failed_ || (root_is(g) && !in_backward_)) {
    check_idle("forward");
    depth_ = 0;
  }
  if (depth_ == 0 && !in_backward_) {  // in backward it is a recomputation
    register_accumulators();
    // Activations grow as the last step's gradients go: both never count at once.
    for (auto& group : groups_) group->discard_spent_gradient();
    refresh();
    cast_inputs(inputs);
  }
  ++depth_;
  if (std::find(observed_.begin(), observed_.end(), g) == observed_.end()) observed_.push_back(g);
  runs_[g].used = true;
  start_gather(g, /*backward=*/false);
  gather_ahead(g, /*backward=*/false);
  groups_[g]->finish_gather();
  if (context_.trace) context_.trace->begin(Doing::compute, fmt::format("forward {}", context_.label_of(g)));
  if (!at::GradMode::is_enabled()) return;
  std::vector<at::Tensor*> differentiable;
  for (at::Tensor* t : inputs)
    if (t->requires_grad()) differentiable.push_back(t);
  if (!differentiable.empty())
    see_backward(differentiable, [weak = weak_from_this(), g] {
      if (auto self = weak.lock()) self->after_backward(g);
    });
}

void Runner::after_forward(int64_t g, std::span<at::Tensor* const> outputs) {
  --depth_;
  if (context_.trace) context_.trace->end();
  bool differentiable = false;
  for (at::Tensor* t : outputs) {
    if (!t->requires_grad()) continue;
    differentiable = true;
    t->register_hook([weak = weak_from_this(), g](const at::Tensor&) {
      if (auto self = weak.lock()) self->before_backward(g);
    });
  }
  if (differentiable) ++runs_[g].forward_uses;
  const bool training = at::GradMode::is_enabled();
  if (!all_gathered_ && !(training && plan::stays_gathered(context_.plan, g))) groups_[g]->release();
  if (training && !in_backward_ && plan::gathers_in_backward(context_.plan, g)) unread_.push_back(g);
  std::erase_if(unread_, [&](int64_t h) { return groups_[h]->drop_unread_shard(); });
  if (training && !in_backward_ && !gathers_after(g)) trim_gather_slots();  // the height is near
  if (depth_ == 0 && !in_backward_) {
    if (!training && !all_gathered_)
      for (auto& group : groups_) group->release();
    end_pass();
  }
  restore_pools();
}

void Runner::forward_failed() noexcept {
  if (depth_ > 0) --depth_;
  context_.trace.reset();  // its spans are of a pass that was broken off
}

// Of the spans of units' backward passes at most one is open, and nothing that began in it.
void Runner::trace_backward(int64_t g) {
  if (std::exchange(traced_backward_, g) >= 0 && context_.trace) context_.trace->end();
  if (g >= 0 && context_.trace)
    context_.trace->begin(Doing::compute, fmt::format("backward {}", context_.label_of(g)));
  else
    traced_backward_ = -1;
}

void Runner::register_accumulators() {
  for (int64_t g = 0; g < std::ssize(groups_); ++g) {
    auto& parameters = groups_[g]->parameters();
    runs_[g].accumulators.resize(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      auto& accumulator = runs_[g].accumulators[i];
      if (accumulator || !parameters[i].leaf.requires_grad()) continue;
      accumulator = torch::autograd::impl::grad_accumulator(parameters[i].leaf);
      DT_CHECK(accumulator != nullptr);
      accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
          [weak = weak_from_this(), g, i](const torch::autograd::variable_list& outputs,
                                          const torch::autograd::variable_list& given) {
            if (auto self = weak.lock()) {
              self->take_gradient(g, i, given.at(0));
              self->leaf_is_done(g, i);
            }
            return outputs;
          }));
    }
  }
}

// Brings the runtime shards up to the main weights. Over several ranks they vote first: any may have written its own.
// Where shards share memory, those who may still read this rank's take part: once all have voted, none does.
void Runner::refresh() {
  const TraceScope traced(context_.trace.get(), Doing::wait, "refresh");
  bool stale = stale_ || exposed_;
  comm::Group& ranks = in_place_ ? *context_.ranks.main : *context_.ranks.refresh;
  if (ranks.size() > 1) {
    const std::byte mine{static_cast<unsigned char>(stale)};
    comm::Identity id = context_.identity(comm::Phase::control, -1);
    id.label = "a forward pass of root";
    for (const auto& vote : ranks.gather_bytes({&mine, 1}, id))
      stale |= vote.at(0) != std::byte{0};
  }
  if (!stale) return;
  if (!all_gathered_)
    for (auto& group : groups_) group->release();
  for (auto& group : groups_) group->encode();
  std::deque<comm::WorkHandle> under_way;
  for (auto& group : groups_) {
    if (comm::WorkHandle work = group->start_refresh()) under_way.push_back(std::move(work));
    if (under_way.size() > 2) {
      under_way.front()->wait();
      under_way.pop_front();
    }
  }
  for (auto& work : under_way) work->wait();
  stale_ = false;
  if (all_gathered_) {
    for (auto& group : groups_) group->release();
    gather_groups();
  }
}

// Where main weights are the runtime parameters that peers read: after a pass its caller may write them again.
void Runner::end_pass() {
  if (!peers_read_main_) return;
  const TraceScope traced(context_.trace.get(), Doing::wait, "end of pass");
  comm::Identity id = context_.identity(comm::Phase::control, -1);
  id.label = "the end of a pass";
  context_.ranks.main->barrier(id);
}

void Runner::cast_inputs(std::span<at::Tensor* const> inputs) const {
  if (!context_.cast_inputs) return;
  const auto type = scalar_type_of(plan::format_named(context_.plan.options.format).gradient);
  for (at::Tensor* t : inputs)
    if (t->is_floating_point() && t->scalar_type() != type) *t = t->to(type);
}

void Runner::start_gather(int64_t g, bool backward) {
  if (groups_[g]->residence() != Residence::released) return;
  groups_[g]->start_gather(backward);
  runs_[g].gathered_backward |= backward;
}

// Starts gathers of the groups that the pass comes to after g.
void Runner::gather_ahead(int64_t g, bool backward) {
  auto gathers = [&](int64_t h) {
    return backward ? plan::gathers_in_backward(context_.plan, h) : plan::gathers_in_forward(context_.plan, h);
  };
  // The root comes before all others in both directions.
  auto at = root_is(g) ? (backward ? order_.end() : order_.begin()) : std::find(order_.begin(), order_.end(), g);
  int ahead = 0;
  if (backward) {
    while (at != order_.begin() && ahead < context_.plan.options.prefetch)
      if (--at; gathers(*at) && runs_[*at].used) start_gather(*at, backward), ++ahead;
  } else {
    if (!root_is(g)) ++at;
    for (; at != order_.end() && ahead < context_.plan.options.prefetch; ++at)
      if (gathers(*at)) start_gather(*at, backward), ++ahead;
  }
}

// Whether this forward pass comes to groups after g that backward gathers again.
bool Runner::gathers_after(int64_t g) const {
  const auto at = std::find(order_.begin(), order_.end(), g);
  return at != order_.end() &&
         std::any_of(at + 1, order_.end(), [&](int64_t h) { return plan::gathers_in_backward(context_.plan, h); });
}

// Backward.

void Runner::begin_backward() {
  leave_broken_backward();
  if (in_backward_) return;
  if (context_.backward_began) context_.backward_began();
  in_backward_ = true;
  // Activations are at their peak, and slots mostly free.
  context_.pool->trim(0);
  context_.scratch_pool->trim(0);
  trim_gather_slots();
  unread_.clear();
  for (GroupRun& run : runs_) {
    run.ready = run.reduced = run.contributed = run.gathered_backward = false;
    run.unwritten = 0;
    run.leaves_done.clear();
  }
  arrived_.clear();
  queue_ = reduce_order();
  next_ = 0;
  const auto callback = std::make_shared<std::weak_ptr<Runner>>(weak_from_this());
  callback_ = callback;
  torch::autograd::Engine::get_default_engine().queue_callback([callback] {
    if (auto self = callback->lock()) self->end_backward();
  });
}

void Runner::before_backward(int64_t g) {
  begin_backward();
  if (at::GradMode::is_enabled()) graph_wanted_ = true;
  if (!context_.plan.groups[g].backward_needs_parameters && !at::GradMode::is_enabled()) return;
  trace_backward(-1);
  if (!root_is(g)) join_skipped_gathers(g);
  start_gather(g, /*backward=*/true);
  GroupRun& run = runs_[g];
  const bool waits = in_flight_.size() >= most_in_flight() && !run.contributed;
  run.unwritten = waits ? (groups_[g]->trainable_elements() + 1) / 2 : 0;
  if (run.unwritten == 0) gather_ahead(g, /*backward=*/true);
  groups_[g]->finish_gather();
  if (!root_is(g)) trace_backward(g);
}

// Units between the last one and g that this rank's backward does not go through: other ranks' may,
// and need its shards.
void Runner::join_skipped_gathers(int64_t g) {
  for (auto it = order_.rbegin(); it != order_.rend() && *it != g; ++it) {
    GroupRun& run = runs_[*it];
    if (run.gathered_backward || run.forward_uses == 0 || !plan::gathers_in_backward(context_.plan, *it)) continue;
    if (groups_[*it]->residence() != Residence::released) continue;
    groups_[*it]->start_gather(/*backward=*/true);
    groups_[*it]->release();
    run.gathered_backward = true;
  }
}

void Runner::after_backward(int64_t g) {
  if (traced_backward_ == g) trace_backward(-1);
  GroupRun& run = runs_[g];
  if (run.forward_uses > 0) --run.forward_uses;
  if (graph_wanted_ || after_graph_) return;
  if (run.forward_uses > 0 || run.when_written) return;
  if (!all_gathered_) groups_[g]->release();
  is_ready(g);
}

// Also where the gradient was written directly: autograd comes to a leaf once in a pass, after all that used it, and to
// one inside of reentrant checkpoints once for each of these.
void Runner::leaf_is_done(int64_t g, size_t parameter) {
  GroupRun& run = runs_[g];
  if (!run.when_written || !in_backward_ || graph_wanted_ || after_graph_) return;
  const auto& parameters = groups_[g]->parameters();
  run.leaves_done.resize(parameters.size());
  run.done_again |= run.leaves_done[parameter];
  run.leaves_done[parameter] = true;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (parameters[i].leaf.requires_grad() && !run.leaves_done[i]) return;
  if (!run.ready) is_ready(g);
}

void Runner::is_ready(int64_t g) {
  runs_[g].ready = true;
  arrived_.push_back(g);
  advance_reductions(/*last=*/false);
}

at::Tensor Runner::direct_contribution(int64_t g, size_t parameter, bool few_rows, bool& fresh) {
  GroupParameter& p = groups_[g]->parameters()[parameter];
  if (!p.leaf.requires_grad()) return {};
  begin_backward();
  if (runs_[g].reduced)
    raise<StateError>("engine: a gradient of {} came after {} was reduced in the same backward pass",
                      context_.plan.tensors[p.index].name, groups_[g]->title());
  runs_[g].contributed = true;
  at::Tensor target = groups_[g]->contribution(p, few_rows, fresh);
  if (p.contributions == 1) count_written(g, p.placement.numel);
  return target;
}

// Half of a gradient written: reductions make room for the gathers that waited for it.
void Runner::count_written(int64_t g, int64_t elements) {
  GroupRun& run = runs_[g];
  if (run.unwritten <= 0) return;
  run.unwritten -= elements;
  if (run.unwritten > 0) return;
  finish_reductions(most_in_flight() - 1);
  trim_pools();
  gather_ahead(g, /*backward=*/true);
}

void Runner::take_gradient(int64_t g, size_t parameter, const at::Tensor& given) {
  GroupParameter& p = groups_[g]->parameters()[parameter];
  at::Tensor grad = p.leaf.grad();
  if (!grad.defined()) return;
  p.leaf.mutable_grad().reset();
  if (at::GradMode::is_enabled())
    raise<StateError>(
        "engine: gradient of {} with a graph of its own (backward with create_graph): wanted "
        "torch::autograd::grad with respect to inputs, then a plain backward", context_.plan.tensors[p.index].name);
  bool fresh = false;
  at::Tensor target = direct_contribution(g, parameter, /*few_rows=*/false, fresh);
  if (!target.defined()) return;
  at::NoGradGuard no_grad;
  if (fresh)
    move_gradient(grad, given, target);
  else
    target.add_(grad);
  context_.ledger.copied(CopyReason::gradient, target.nbytes());
}

bool Runner::takes_part(int64_t g) const {
  // With gathered parameters all ranks have run the same units; without, any rank may have run any.
  return !groups_[g]->empty() && groups_[g]->trainable() && (context_.degrees().zero3 == 1 || runs_[g].used);
}

std::vector<int64_t> Runner::reduce_order() const {
  std::vector<int64_t> order;
  for (auto it = order_.rbegin(); it != order_.rend(); ++it)
    if (takes_part(*it)) order.push_back(*it);
  if (const int64_t root = std::ssize(groups_) - 1; takes_part(root)) order.push_back(root);
  return order;
}

void Runner::advance_reductions(bool last) {
  while (next_ < queue_.size() && (last || (has_its_turn(queue_[next_]) && !root_is(queue_[next_]))))
    launch_reduction(queue_[next_++]);
}

// One that is reduced when written has it as well once a group after it is ready: this pass does without it, while
// other ranks may wait for it before they go on to gathers that this one waits for.
bool Runner::has_its_turn(int64_t g) const {
  if (runs_[g].ready || !runs_[g].when_written) return runs_[g].ready;
  return std::any_of(queue_.begin() + next_ + 1, queue_.end(), [&](int64_t h) { return runs_[h].ready; });
}

void Runner::launch_reduction(int64_t g) {
  const TraceScope traced(context_.trace.get(), Doing::reduce, "reduce", context_.label_of(g));
  finish_reductions(most_in_flight() - 1);
  groups_[g]->start_reduce(sync_);
  runs_[g].reduced = true;
  if (groups_[g]->gradient_state() == GradientState::reducing) in_flight_.push_back(g);
  if (context_.plan.options.pending_reductions == 0) finish_reductions(0);
  trim_pools();
}

size_t Runner::most_in_flight() const { return std::max(1, context_.plan.options.pending_reductions); }

void Runner::finish_reductions(size_t left) {
  if (in_flight_.size() <= left) return;
  const TraceScope traced(context_.trace.get(), Doing::reduce, "finish reductions");
  while (in_flight_.size() > left) {
    groups_[in_flight_.front()]->finish_reduce();
    in_flight_.pop_front();
  }
}

void Runner::end_backward() {
  trace_backward(-1);
  in_backward_ = false;
  if (std::exchange(graph_wanted_, false)) {
    for (int64_t g = 0; g < std::ssize(groups_); ++g)
      if (runs_[g].contributed) failed_ = true;
    after_graph_ = true;
    end_pass();
    return;  // the graph reads the gathered parameters; the next plain backward or forward releases them
  }
  failed_ = true;  // until all has gone well
  if (!all_gathered_)
    for (auto& group : groups_) group->release();
  trim_gather_slots();  // gradients are at their peak
  advance_reductions(/*last=*/true);
  finish_reductions(0);
  audit();
  trim_gradients();
  if (sync_ && context_.completes_gradients) complete_gradients();
  end_pass();
  after_graph_ = failed_ = false;
  if (context_.backward_ended) context_.backward_ended();
}

// What hooks cannot see (outputs hidden in objects, side channels) shows here.
void Runner::audit() const {
  for (int64_t g = 0; g < std::ssize(groups_); ++g) {
    const ShardGroup& group = *groups_[g];
    DT_CHECK(group.gradient_state() == GradientState::closed, "{} ends backward with an open gradient",
             group.title());
    DT_CHECK(all_gathered_ || group.residence() == Residence::released, "{} ends backward gathered", group.title());
    DT_CHECK(!runs_[g].contributed || runs_[g].reduced, "{} has gradients that were not reduced", group.title());
  }
}

}  // namespace dovetail::engine_detail

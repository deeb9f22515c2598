#include "dovetail/engine/step.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/numerics/reproducible_sum.h"

namespace dovetail::engine_detail {
namespace {

// What ranks tell one another once a step: the norm's partial sum, which parameters got a gradient,
// and the order in which units ran. Replicas hold the same gradients: only the first one's sums
// count.
struct StepMessage {
  ReproducibleSum::Bytes partial;
  std::vector<uint8_t> contributed;  // per parameter
  std::vector<int64_t> order;

  std::vector<std::byte> pack() const {
    std::vector<std::byte> out(partial.begin(), partial.end());
    const auto flags = std::as_bytes(std::span(contributed)),
               units = std::as_bytes(std::span(order));
    out.insert(out.end(), flags.begin(), flags.end());
    out.insert(out.end(), units.begin(), units.end());
    return out;
  }
};

}  // namespace

Stepper::Stepper(Context& context, Runner& runner, UpdateOps ops, ClipOptions norm, uint64_t seed)
    : context_(context),
      runner_(runner),
      ops_(std::move(ops)),
      update_(plan_update(context.plan, ops_)),
      norm_(norm),
      seed_(seed),
      state_(context, runner.groups(), update_),
      units_{.context = context,
             .update = update_,
             .ops = ops_,
             .state = state_,
             .places = std::vector<ParameterPlace>(context.plan.tensors.size()),
             .workspace = {},
             .sent = {}},
      next_op_(context.plan.tensors.size()) {
  for (auto& group : runner.groups())
    for (const GroupParameter& p : group->parameters()) units_.places[p.index] = {group.get(), &p};
  const plan::Plan& plan = context.plan;
  plan::HeldBytes need;
  plan::add_unit_bytes(plan, update_.demands, update_.owners, context.rank(), need);
  workspace_ = Buffer(context.allocator, context.ledger, need.workspace, Role::workspace);
  units_.workspace = {workspace_.data(), static_cast<size_t>(need.workspace)};
  for (int64_t slot :
       plan::staging_slots(plan, update_.demands, update_.owners, context.rank()))
    staging_.emplace_back(context.shared_allocator(), context.ledger, slot, Role::staging);
  for (size_t b = 0; b < update_.batches.size(); ++b) batches_.emplace_back(units_, b);
}

void Stepper::change_operations(UpdateOps ops) {
  const UpdatePlan now = plan_update(context_.plan, ops);
  if (now.updates != update_.updates || now.unit_state != update_.unit_state || now.demands != update_.demands)
    raise<ConfigError>("change_operations: wanted operations with the state and units of {}, got {}", describe(ops_),
                       describe(ops));
  ops_ = std::move(ops);
}

ClipResult Stepper::measure(double grad_scale, std::vector<bool>& contributed) {
  const TraceScope traced(context_.trace.get(), Doing::update, "norm");
  auto& groups = runner_.groups();
  StepMessage message;
  message.contributed.resize(context_.plan.tensors.size());
  message.order = runner_.observed_order();
  ReproducibleSum sum;
  for (auto& group : groups) {
    if (!group->has_gradient()) continue;
    for (const GroupParameter& p : group->parameters()) {
      if (!p.leaf.requires_grad()) continue;
      message.contributed[p.index] = p.contributed;
    }
    group->add_squares(sum, runner_.exposed());
  }
  message.partial = sum.to_bytes();
  const auto all =
      context_.ranks.world->gather_bytes(message.pack(), context_.identity(comm::Phase::norm, -1));

  std::vector<std::byte> partials;
  contributed.assign(message.contributed.size(), false);
  const size_t flags_at = ReproducibleSum::kBytes, order_at = flags_at + contributed.size();
  for (size_t r = 0; r < all.size(); ++r) {
    DT_CHECK_EQ(all[r].size(), all[0].size());
    if (plan::position_of(context_.degrees(), context_.ranks.world->global_ranks()[r]).replica == 0)
      partials.insert(partials.end(), all[r].begin(), all[r].begin() + flags_at);
    for (size_t i = 0; i < contributed.size(); ++i)
      if (all[r][flags_at + i] != std::byte{0}) contributed[i] = true;
  }
  runner_.adopt_order(message.order, all, order_at);
  return clip_by_global_norm(partials, norm_, grad_scale);
}

StepResult Stepper::step(float lr, double grad_scale) {
  runner_.check_idle("step");
  if (ops_.empty()) raise<StateError>("engine: step without update operations");
  runner_.complete_gradients();
  std::vector<bool> contributed;
  const ClipResult clip = measure(grad_scale, contributed);
  StepResult result{
      .grad_norm = clip.norm, .clip_coefficient = clip.coefficient, .skipped = !clip.finite};
  if (clip.finite) {
    std::vector<bool> takes_part(contributed.size());
    for (auto& group : runner_.groups())
      for (const GroupParameter& p : group->parameters())
        takes_part[p.index] =
            contributed[p.index] && p.leaf.requires_grad() && group->has_gradient();
    update({.step = context_.steps + 1, .lr = lr, .grad_scale = clip.grad_scale, .seed = seed_},
           takes_part);
    ++context_.steps;
    runner_.mark_stale();
  }
  runner_.drop_gradients();
  return result;
}

bool Stepper::updates(size_t batch, int64_t parameter, const std::vector<bool>& takes_part) const {
  if (!takes_part[parameter]) return false;
  const TensorSpec& t = context_.plan.tensors[parameter];
  const auto op = static_cast<size_t>(update_.batches[batch].op);
  const auto& ops = update_.updates[parameter].ops;
  return std::find(ops.begin(), ops.end(), op) != ops.end() && ops_[op]->unit(t).is_assembled();
}

// Three batches are under way at a time: one's fragments arrive and one's results go back while one
// is computed.
void Stepper::update(const StepContext& step, const std::vector<bool>& takes_part) {
  const TraceScope traced(context_.trace.get(), Doing::update, "update");
  std::fill(next_op_.begin(), next_op_.end(), 0);
  unfinished_ = 0;
  const auto& batches = update_.batches;
  size_t started = 0;
  auto start_next = [&] {
    start(started, step, takes_part);
    ++started;
  };
  if (!batches.empty()) start_next();
  // What needs no unit, while the first fragments travel.
  for (int64_t p = 0; p < std::ssize(takes_part); ++p) {
    const auto& ops = update_.updates[p].ops;
    const TensorSpec& t = context_.plan.tensors[p];
    if (takes_part[p] && std::none_of(ops.begin(), ops.end(),
                                      [&](size_t op) { return ops_[op]->unit(t).is_assembled(); }))
      advance(p, step);
  }
  for (size_t b = 0; b < batches.size(); ++b) {
    if (started == b) start_next();
    // A second operation of one group waits for the results of the first.
    if (started == b + 1 && started < batches.size() && batches[started].group != batches[b].group)
      start_next();
    batches_[b].compute(step);
  }
  while (unfinished_ < batches.size()) finish(unfinished_, step, takes_part);
}

void Stepper::start(size_t batch, const StepContext& step, const std::vector<bool>& takes_part) {
  const auto& batches = update_.batches;
  const size_t slots = staging_.size();
  while (unfinished_ < batch &&
         (unfinished_ + slots <= batch || batches[batch - 1].group == batches[batch].group))
    finish(unfinished_, step, takes_part);
  for (const GroupParameter& p : runner_.groups()[batches[batch].group]->parameters())
    if (updates(batch, p.index, takes_part)) advance(p.index, step);
  batches_[batch].start(staging_[batch % slots].data(), takes_part);
}

void Stepper::finish(size_t batch, const StepContext& step, const std::vector<bool>& takes_part) {
  DT_CHECK_EQ(batch, unfinished_);
  batches_[batch].finish();
  ++unfinished_;
  for (const GroupParameter& p : runner_.groups()[update_.batches[batch].group]->parameters()) {
    if (!updates(batch, p.index, takes_part)) continue;
    ++next_op_[p.index];
    advance(p.index, step);
  }
}

void Stepper::advance(int64_t parameter, const StepContext& step) {
  const TensorSpec& spec = context_.plan.tensors[parameter];
  const ParameterPlace& place = units_.places[parameter];
  const Interval own = place.parameter->chain.held(Level::zero1);
  const auto& ops = update_.updates[parameter].ops;
  size_t& next = next_op_[parameter];
  for (; next < ops.size() && !ops_[ops[next]]->unit(spec).is_assembled(); ++next) {
    if (own.empty()) continue;
    const UpdateOp& op = *ops_[ops[next]];
    std::vector<Field> fields;
    for (const FieldUse& use : op.uses(spec))
      fields.push_back(state_.field(*place.group, *place.parameter, use.name));
    op.run({.tensor = &spec,
            .index = parameter,
            .place = {.first = own.begin, .rows = 1, .columns = own.size(), .stride = own.size()},
            .unit = -1,
            .row_stride = own.size(),
            .fields = fields,
            .workspace = {}},
           step);
  }
}

}  // namespace dovetail::engine_detail

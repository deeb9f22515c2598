#include "dovetail/engine/step.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/numerics/reproducible_sum.h"

namespace dovetail::engine_detail {
namespace {

// What ranks tell one another once a step: the norm's partial sum, which parameters got a gradient, and the order in
// which units ran. Replicas hold the same gradients: only the first one's sums count.
struct StepMessage {
  ReproducibleSum::Bytes partial;
  std::vector<uint8_t> contributed;  // per parameter
  std::vector<int64_t> order;

  std::vector<std::byte> pack() const {
    std::vector<std::byte> out(partial.begin(), partial.end());
    const auto flags = std::as_bytes(std::span(contributed)), units = std::as_bytes(std::span(order));
    out.insert(out.end(), flags.begin(), flags.end());
    out.insert(out.end(), units.begin(), units.end());
    return out;
  }
};

void fill(std::byte* data, DType dtype, int64_t count, float value) {
  if (value == 0) return;  // new memory is zero
  DT_CHECK(dtype == DType::f32, "an initial value other than 0 for state of dtype {}", name_of(dtype));
  std::fill_n(reinterpret_cast<float*>(data), count, value);
}

bool is_whole_everywhere(const Unit& unit, const plan::Degrees& degrees) {
  return unit.kind == UnitKind::element || degrees.zero1 == 1;
}

}  // namespace

Stepper::Stepper(Context& context, Runner& runner, UpdateOps ops, ClipOptions norm, uint64_t seed)
    : context_(context), runner_(runner), ops_(std::move(ops)), norm_(norm), seed_(seed) {
  updates_ = plan_updates(ops_, context.plan.tensors);
  for (size_t i = 0; i < updates_.size(); ++i) {
    const TensorSpec& t = context.plan.tensors[i];
    for (size_t op : updates_[i].ops)
      if (!is_whole_everywhere(ops_[op]->unit(t), context.degrees()))
        raise<ConfigError>("optimizer: {} needs units of {} that zero1 = {} may cut; wanted an "
                           "element-wise operation or zero1 = 1", ops_[op]->name(), t.name, context.degrees().zero1);
  }
  fields_.resize(context.plan.groups.size());
  for (int64_t g = 0; g < std::ssize(fields_); ++g) allocate(g);
}

void Stepper::allocate(int64_t g) {
  ShardGroup& group = *runner_.groups()[g];
  for (const GroupParameter& p : group.parameters()) {
    for (const StateField& f : updates_[p.index].state) {
      auto [it, fresh] = fields_[g].try_emplace(f.name);
      if (fresh) {
        it->second.dtype = f.dtype;
        it->second.buffer =
            Buffer(context_.allocator, context_.ledger, group.main_elements() * size_of(f.dtype), Role::state);
      }
      if (it->second.dtype != f.dtype)
        raise<ConfigError>("optimizer: state {} is {} for one parameter of {} and {} for {}", f.name,
                           name_of(it->second.dtype), group.title(), name_of(f.dtype),
                           context_.plan.tensors[p.index].name);
      fill(it->second.buffer.data() + group.main_position(p) * size_of(f.dtype), f.dtype,
           p.chain.held(Level::zero1).size(), f.initial);
    }
  }
}

std::vector<int64_t> Stepper::state_bytes(const plan::Plan& plan, const UpdateOps& ops) {
  std::vector<int64_t> bytes;
  for (const ParameterUpdate& update : plan_updates(ops, plan.tensors)) {
    bytes.push_back(0);
    for (const StateField& f : update.state) bytes.back() += size_of(f.dtype);
  }
  return bytes;
}

StepResult Stepper::step(float lr, double grad_scale) {
  runner_.check_idle("step");
  auto& groups = runner_.groups();
  for (auto& group : groups) group->reduce_main();

  StepMessage message;
  message.contributed.resize(context_.plan.tensors.size());
  message.order = runner_.observed_order();
  ReproducibleSum sum;
  for (auto& group : groups) {
    if (!group->has_gradient()) continue;
    for (const GroupParameter& p : group->parameters()) {
      if (!p.leaf.requires_grad()) continue;
      message.contributed[p.index] = p.contributed;
      sum.add({group->main_gradient_at(p), static_cast<size_t>(p.chain.held(Level::zero1).size())});
    }
  }
  message.partial = sum.to_bytes();
  const auto all = context_.ranks.world->gather_bytes(message.pack(), context_.identity(comm::Phase::norm, -1));

  std::vector<std::byte> partials;
  std::vector<bool> contributed(message.contributed.size());
  bool same_order = true;
  const size_t flags_at = ReproducibleSum::kBytes, order_at = flags_at + contributed.size();
  for (size_t r = 0; r < all.size(); ++r) {
    DT_CHECK_EQ(all[r].size(), all[0].size());
    if (plan::position_of(context_.degrees(), context_.ranks.world->global_ranks()[r]).replica == 0)
      partials.insert(partials.end(), all[r].begin(), all[r].begin() + flags_at);
    for (size_t i = 0; i < contributed.size(); ++i)
      if (all[r][flags_at + i] != std::byte{0}) contributed[i] = true;
    same_order &= std::equal(all[r].begin() + order_at, all[r].end(), all[0].begin() + order_at);
  }

  const ClipResult clip = clip_by_global_norm(partials, norm_, grad_scale);
  StepResult result{.grad_norm = clip.norm, .clip_coefficient = clip.coefficient, .skipped = !clip.finite};
  if (clip.finite) {
    const StepContext step{.step = context_.steps + 1, .lr = lr, .grad_scale = clip.grad_scale, .seed = seed_};
    for (int64_t g = 0; g < std::ssize(groups); ++g)
      for (const GroupParameter& p : groups[g]->parameters())
        if (contributed[p.index] && p.leaf.requires_grad() && groups[g]->has_gradient()) run_ops(g, p, step);
    ++context_.steps;
    runner_.mark_stale();
  }
  if (same_order) runner_.adopt_order(message.order);
  runner_.drop_gradients();
  return result;
}

Field Stepper::field_of(int64_t g, const GroupParameter& p, const std::string& name) const {
  const ShardGroup& group = *runner_.groups()[g];
  if (name == kWeight) return {kWeight, context_.plan.options.main, group.main_at(p)};
  if (name == kGrad) return {kGrad, DType::f32, reinterpret_cast<std::byte*>(group.main_gradient_at(p))};
  const auto it = fields_[g].find(name);
  DT_CHECK(it != fields_[g].end(), "field {} of {}", name, context_.plan.tensors[p.index].name);
  const GroupField& f = it->second;
  return {it->first, f.dtype, f.buffer.data() + group.main_position(p) * size_of(f.dtype)};
}

void Stepper::run_ops(int64_t g, const GroupParameter& p, const StepContext& context) {
  const TensorSpec& spec = context_.plan.tensors[p.index];
  const Interval own = p.chain.held(Level::zero1);
  if (own.empty()) return;
  for (size_t op : updates_[p.index].ops) {
    std::vector<Field> fields;
    for (const FieldUse& use : ops_[op]->uses(spec)) fields.push_back(field_of(g, p, use.name));
    ops_[op]->run({.tensor = &spec, .index = p.index, .elements = own, .fields = fields}, context);
  }
}

void Stepper::list_state(ShardedState& out, bool writer) const {
  for (int64_t g = 0; g < std::ssize(fields_); ++g) {
    for (const GroupParameter& p : runner_.groups()[g]->parameters()) {
      const TensorSpec& spec = context_.plan.tensors[p.index];
      std::vector<std::string> names{std::string(kWeight)};
      for (const StateField& f : updates_[p.index].state) names.push_back(f.name);
      for (const std::string& name : names) {
        const Field f = field_of(g, p, name);
        out.push_back({.tensor = spec.name, .field = name, .shape = spec.shape, .dtype = f.dtype,
                       .elements = p.chain.held(Level::zero1), .data = f.data, .writer = writer});
      }
    }
  }
}

}  // namespace dovetail::engine_detail

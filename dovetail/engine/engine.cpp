#include "dovetail/engine/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "dovetail/base/error.h"
#include "dovetail/engine/initial.h"
#include "dovetail/engine/module_scan.h"
#include "dovetail/engine/runner.h"
#include "dovetail/engine/step.h"
#include "dovetail/engine/update_plan.h"
#include "dovetail/plan/schedule.h"

namespace dovetail {
namespace engine_detail {
namespace {

class Hooks : public ops::UnitHooks {
 public:
  Hooks(std::shared_ptr<Runner> runner, int64_t group) : runner_(std::move(runner)), group_(group) {}
  void before_forward(std::span<at::Tensor* const> inputs) override { runner_->before_forward(group_, inputs); }
  void after_forward(std::span<at::Tensor* const> outputs) override { runner_->after_forward(group_, outputs); }
  void forward_failed() noexcept override { runner_->forward_failed(); }

 private:
  std::shared_ptr<Runner> runner_;
  int64_t group_;
};

class Sink : public ops::GradientSink {
 public:
  Sink(std::weak_ptr<Runner> runner, int64_t group, size_t parameter)
      : runner_(std::move(runner)), group_(group), parameter_(parameter) {}

  std::optional<Target> next_contribution(bool few_rows) override {
    const auto runner = runner_.lock();
    if (!runner || at::GradMode::is_enabled()) return std::nullopt;
    bool fresh = false;
    at::Tensor view = runner->direct_contribution(group_, parameter_, few_rows, fresh);
    if (!view.defined()) return std::nullopt;
    return Target{std::move(view), fresh};
  }

 private:
  std::weak_ptr<Runner> runner_;
  int64_t group_;
  size_t parameter_;
};

TensorSpec spec_of(const UnitParameter& p, const std::vector<TensorSpec>& hints) {
  TensorSpec spec{.name = p.name, .shape = p.shape()};
  spec.kind = kind_of_shape(spec.shape);
  for (const TensorSpec& hint : hints) {
    if (hint.name != p.name) continue;
    if (hint.shape != spec.shape)
      raise<ConfigError>("hint for {}: wanted shape [{}], got [{}]", p.name, fmt::join(spec.shape, ", "),
                         fmt::join(hint.shape, ", "));
    return hint;
  }
  return spec;
}

std::vector<plan::GroupSpec> group_specs(const UnitModel& model, const std::vector<TensorSpec>& hints,
                                        const UpdateOps& ops) {
  std::vector<plan::GroupSpec> specs;
  for (const ModelUnit& unit : model.units) {
    plan::GroupSpec spec;
    spec.name = unit.name;
    spec.backward_needs_parameters = unit.backward_needs_parameters;
    spec.format = unit.format;
    spec.keep_after_forward = unit.keep_after_forward;
    for (const UnitParameter& p : unit.parameters) {
      spec.tensors.push_back(spec_of(p, hints));
      spec.needs.push_back(update_needs(spec.tensors.back(), ops));
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

torch::nn::Module& existing(const std::shared_ptr<torch::nn::Module>& root) {
  DT_CHECK(root != nullptr, "an engine without a model");
  return *root;
}

}  // namespace

// Members in order of construction; the module is let go last.
class EngineImpl {
 public:
  EngineImpl(std::shared_ptr<torch::nn::Module> root, std::shared_ptr<comm::Group> world, EngineOptions options,
             UpdateOps optimizer)
      : EngineImpl(scan(existing(root)), std::move(world), std::move(options), std::move(optimizer)) {
    root_ = std::move(root);
    attach();
  }

  EngineImpl(ScannedModel scanned, std::shared_ptr<comm::Group> world, EngineOptions options, UpdateOps optimizer)
      : options_(std::move(options)), ops_(std::move(optimizer)), units_(std::move(scanned.units)),
        sink_users_(std::move(scanned.sink_users)), model_(std::move(scanned.model)) {
    DT_CHECK(world != nullptr);
    settle_initial(model_, options_.initial, *world);
    options_.plan.world = world->size();
    options_.plan.host_ranks = world->host_ranks();
    context_.plan = plan::make_plan(options_.plan, group_specs(model_, options_.hints, ops_));
    if (context_.plan.options.main != DType::f32)
      raise<ConfigError>("main weights: wanted fp32, got {}", name_of(context_.plan.options.main));
    compare_plans(context_.plan, describe(ops_), *world);
    context_.position = plan::position_of(context_.degrees(), world->global_ranks()[world->rank()]);
    context_.ranks = make_rank_groups(std::move(world), context_.degrees());
    if (comm::SharedMemory* shared = context_.ranks.world->shared_memory())
      context_.peer_allocator = std::make_unique<PeerAllocator>(*shared);
    const plan::PoolSlots slots = plan::pool_slots(context_.plan);
    Allocator& memory = context_.shared_allocator();
    context_.pool = std::make_unique<SlotPool>(memory, context_.ledger, slots.buffers);
    context_.scratch_pool = std::make_unique<SlotPool>(memory, context_.ledger, slots.scratch);
    context_.cast_inputs = options_.cast_inputs;
    runner_ = std::make_shared<Runner>(context_);
    adopt_parameters();
    stepper_ = std::make_unique<Stepper>(context_, *runner_, ops_, options_.norm, options_.seed);
  }

  ~EngineImpl() {
    for (ops::UnitBase* unit : units_)
      if (unit) unit->detach();
    for (ops::SinkUser* user : sink_users_)
      for (const at::Tensor& t : user->sink_parameters()) user->set_sink(t, nullptr);
    for (auto& group : runner_->groups()) group->unbind_all();
  }

  void adopt_parameters() {
    int64_t index = 0;
    for (size_t g = 0; g < model_.units.size(); ++g) {
      ShardGroup& group = *runner_->groups()[g];
      for (UnitParameter& p : model_.units[g].parameters) {
        place_.push_back({static_cast<int64_t>(g), group.parameters().size()});
        group.adopt(index++, p);
        p.shard.reset();
      }
      group.on_residence_change(model_.units[g].residence_changed);
      if (model_.units[g].behind_units) runner_->reduce_when_written(static_cast<int64_t>(g));
    }
  }

  // To the units and linears of a tree of modules.
  void attach() {
    for (size_t g = 0; g < units_.size(); ++g) {
      if (!units_[g]) continue;
      units_[g]->attach(std::make_shared<Hooks>(runner_, g));
      // The root's forward is the whole model's; a unit whose backward reads no parameter is not gathered for it, and
      // has nothing worth recomputing.
      if (options_.recompute && !model_.units[g].name.empty() && model_.units[g].backward_needs_parameters)
        units_[g]->set_recompute(true);
    }
    for (ops::SinkUser* user : sink_users_) {
      for (const at::Tensor& t : user->sink_parameters()) {
        const auto [group, parameter] = place_of(t);
        user->set_sink(t, std::make_shared<Sink>(runner_, group, parameter));
      }
    }
  }

  std::pair<int64_t, size_t> place_of(const at::Tensor& leaf) const {
    for (const auto& place : place_)
      if (runner_->groups()[place.first]->parameters()[place.second].leaf.is_same(leaf)) return place;
    raise<ConfigError>("a module offers to write the gradient of a tensor that is no parameter of the model");
  }

  ShardGroup& group_of(int64_t index) { return *runner_->groups()[place_.at(index).first]; }
  GroupParameter& parameter(int64_t index) { return group_of(index).parameters()[place_.at(index).second]; }

  std::shared_ptr<torch::nn::Module> root_;
  EngineOptions options_;
  UpdateOps ops_;
  std::vector<ops::UnitBase*> units_;       // of a tree of modules; null where there is none
  std::vector<ops::SinkUser*> sink_users_;
  UnitModel model_;
  Context context_;
  std::shared_ptr<Runner> runner_;
  std::unique_ptr<Stepper> stepper_;
  std::vector<std::pair<int64_t, size_t>> place_;  // per parameter: group, number in it
};

}  // namespace engine_detail

using engine_detail::GroupParameter;
using engine_detail::ShardGroup;

Engine::Engine(std::shared_ptr<torch::nn::Module> root, std::shared_ptr<comm::Group> world, EngineOptions options,
               UpdateOps optimizer)
    : impl_(std::make_shared<engine_detail::EngineImpl>(std::move(root), std::move(world), std::move(options),
                                                        std::move(optimizer))) {}

Engine::Engine(UnitModel model, std::shared_ptr<comm::Group> world, EngineOptions options, UpdateOps optimizer)
    : impl_(std::make_shared<engine_detail::EngineImpl>(engine_detail::ScannedModel{std::move(model), {}, {}},
                                                        std::move(world), std::move(options), std::move(optimizer))) {}

Engine::~Engine() = default;

const plan::Plan& Engine::plan() const { return impl_->context_.plan; }
void Engine::set_gradient_sync(bool sync) { impl_->runner_->set_sync(sync); }
StepResult Engine::step(float lr, double grad_scale) { return impl_->stepper_->step(lr, grad_scale); }
std::string Engine::describe_optimizer() const { return describe(impl_->ops_); }
int64_t Engine::steps_done() const { return impl_->context_.steps; }
const Ledger& Engine::ledger() const { return impl_->context_.ledger; }
void Engine::gather(int64_t unit) { impl_->runner_->gather(unit); }
void Engine::release(int64_t unit) { impl_->runner_->release(unit); }
void Engine::gather_all() { impl_->runner_->gather_all(); }
void Engine::release_all() { impl_->runner_->release_all(); }
std::vector<TensorAlias> Engine::aliases() const { return impl_->model_.aliases; }
void Engine::state_was_loaded() { impl_->runner_->mark_stale(); }

std::shared_ptr<ops::UnitHooks> Engine::hooks(int64_t unit) {
  DT_CHECK(0 <= unit && unit < std::ssize(impl_->runner_->groups()), "unit {}", unit);
  return std::make_shared<engine_detail::Hooks>(impl_->runner_, unit);
}

void Engine::on_backward(std::function<void()> begin, std::function<void()> end) {
  impl_->context_.backward_began = std::move(begin);
  impl_->context_.backward_ended = std::move(end);
}

bool Engine::in_backward() { return impl_->runner_->in_backward(); }

int64_t Engine::broken_backwards() const { return impl_->runner_->broken_backwards(); }

void Engine::discard_gradients() {
  in_backward();
  for (auto& group : impl_->runner_->groups()) group->drop_gradient();
}

std::vector<bool> Engine::have_gradients() {
  const size_t count = impl_->place_.size();
  std::vector<std::byte> mine;
  for (size_t i = 0; i < count; ++i)
    mine.push_back(std::byte{impl_->parameter(static_cast<int64_t>(i)).contributed});
  const std::vector<int64_t> order = impl_->runner_->observed_order();
  const auto order_bytes = std::as_bytes(std::span(order));
  mine.insert(mine.end(), order_bytes.begin(), order_bytes.end());
  std::vector<bool> any(count);
  comm::Identity id = impl_->context_.identity(comm::Phase::control, -1);
  id.label = "parameters that have a gradient";
  const auto all = impl_->context_.ranks.world->gather_bytes(mine, id);
  for (const auto& theirs : all)
    for (size_t i = 0; i < count; ++i) any[i] = any[i] || theirs[i] != std::byte{0};
  impl_->runner_->adopt_order(order, all, count);
  for (size_t i = 0; i < any.size(); ++i) any[i] = any[i] && impl_->group_of(static_cast<int64_t>(i)).has_gradient();
  return any;
}

void Engine::set_gradient_factor(float factor) {
  impl_->runner_->check_idle("set_gradient_factor");
  impl_->context_.gradient_factor = factor;
}

void Engine::set_gradient_completion(bool complete) {
  impl_->runner_->check_idle("set_gradient_completion");
  impl_->context_.completes_gradients = complete;
}

std::shared_ptr<ops::GradientSink> Engine::sink(int64_t parameter) {
  const auto [group, number] = impl_->place_.at(parameter);
  return std::make_shared<engine_detail::Sink>(impl_->runner_, group, number);
}

void Engine::change_operations(UpdateOps ops) {
  impl_->runner_->check_idle("change_operations");
  engine_detail::compare_plans(plan(), describe(ops), *impl_->context_.ranks.world);
  impl_->stepper_->change_operations(ops);
  impl_->ops_ = std::move(ops);
}

void Engine::set_operations(UpdateOps ops) {
  impl_->runner_->check_idle("set_operations");
  engine_detail::compare_plans(plan(), describe(ops), *impl_->context_.ranks.world);
  engine_detail::plan_update(plan(), ops);  // refuses what does not fit, before anything is given up
  const EngineOptions& options = impl_->options_;
  impl_->stepper_.reset();  // its memory is given back first
  impl_->stepper_ = std::make_unique<engine_detail::Stepper>(impl_->context_, *impl_->runner_, ops, options.norm,
                                                             options.seed);
  impl_->ops_ = std::move(ops);
}

void Engine::zero_grad() {
  impl_->runner_->check_idle("zero_grad");
  impl_->runner_->drop_gradients();
}

void Engine::set_steps_done(int64_t steps) {
  impl_->runner_->check_idle("set_steps_done");
  if (steps < 0) raise<ConfigError>("set_steps_done: wanted 0 or more, got {}", steps);
  impl_->context_.steps = steps;
}

std::vector<UpdateParameter> Engine::parameters() {
  impl_->runner_->expose();
  std::vector<UpdateParameter> out;
  const plan::Plan& plan = impl_->context_.plan;
  for (int64_t i = 0; i < std::ssize(plan.tensors); ++i) {
    ShardGroup& group = impl_->group_of(i);
    const GroupParameter& p = impl_->parameter(i);
    const Interval own = p.chain.held(Level::zero1);
    const int64_t n = own.size();
    auto view = [n](const Memory& memory, const void* data, DType dtype) {
      return n ? tensor_in(memory, static_cast<const std::byte*>(data) - memory.data, {n}, dtype)
               : at::empty({0}, scalar_type_of(dtype));
    };
    out.push_back({.spec = &plan.tensors[i], .group = impl_->place_[i].first, .elements = own,
                   .main = view(group.main_memory(p), group.main_at(p), plan.options.main),
                   .grad = view(group.main_gradient_memory(), group.main_gradient_at(p), DType::f32),
                   .trainable = p.leaf.requires_grad()});
  }
  return out;
}

at::Tensor Engine::whole_parameter(int64_t index) {
  impl_->runner_->check_idle("whole_parameter");
  const plan::Plan& plan = impl_->context_.plan;
  ShardGroup& group = impl_->group_of(index);
  const GroupParameter& p = impl_->parameter(index);
  const TensorSpec& spec = plan.tensors.at(index);
  const DType dtype = plan.options.main;
  at::Tensor whole = at::empty(spec.shape, scalar_type_of(dtype));
  comm::Group& ranks = *impl_->context_.ranks.main;
  const SegmentLayout& layout = *group.segments()[p.segment].layout;
  comm::GatherPlane plane;
  int64_t end = 0;
  for (int64_t q = 0; q < ranks.size(); ++q) {
    const Interval part = intersect(layout.zero1_interval(q), p.placement.interval());
    const Interval own = part.shifted(-p.placement.offset);
    const Interval bytes{own.begin * size_of(dtype), own.end * size_of(dtype)};
    plane.slices.push_back(part.empty() ? Interval{end, end} : bytes);
    end = plane.slices.back().end;
  }
  plane.shard = group.main_at(p);
  plane.whole = static_cast<std::byte*>(whole.data_ptr());
  comm::Gathered result = ranks.all_gather({&plane, 1}, impl_->context_.identity(comm::Phase::state, -1));
  result.work->wait();
  if (result.whole[0] != plane.whole && end > 0) std::memcpy(plane.whole, result.whole[0], end);
  impl_->context_.ledger.copied(CopyReason::request, end);
  return whole;
}

at::Tensor Engine::whole_gradient(int64_t index) {
  impl_->runner_->check_idle("whole_gradient");
  ShardGroup& group = impl_->group_of(index);
  const GroupParameter& p = impl_->parameter(index);
  at::Tensor whole = at::zeros(impl_->context_.plan.tensors.at(index).shape, at::kFloat);
  float* data = whole.data_ptr<float>();
  group.add_gradient_to(p, data);
  // Zeros elsewhere change no bits of the sum.
  comm::Group& world = *impl_->context_.ranks.world;
  std::vector<std::byte> scratch(world.all_reduce_scratch_bytes(whole.numel()));
  world.all_reduce({data, static_cast<size_t>(whole.numel())}, scratch,
                   impl_->context_.identity(comm::Phase::state, -1))->wait();
  impl_->context_.ledger.copied(CopyReason::request, whole.nbytes());
  return whole;
}

void Engine::inject_gradients(const std::vector<at::Tensor>& gradients) {
  const plan::Plan& plan = impl_->context_.plan;
  if (gradients.size() != plan.tensors.size())
    raise<ConfigError>("inject_gradients: wanted {} gradients, got {}", plan.tensors.size(), gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined() && gradients[i].sizes().vec() != plan.tensors[i].shape)
      raise<ConfigError>("inject_gradients: {}: wanted shape [{}], got [{}]", plan.tensors[i].name,
                         fmt::join(plan.tensors[i].shape, ", "), fmt::join(gradients[i].sizes(), ", "));
  at::NoGradGuard no_grad;
  impl_->runner_->inject([&](ShardGroup& group) {
    for (GroupParameter& p : group.parameters()) {
      if (!gradients[p.index].defined() || !p.leaf.requires_grad()) continue;
      bool fresh = false;
      at::Tensor target = group.contribution(p, /*few_rows=*/false, fresh);
      target.copy_(gradients[p.index]);
    }
  });
}

ShardedState Engine::state() {
  impl_->runner_->check_idle("state");
  ShardedState out;
  impl_->stepper_->list_state(out);
  return out;
}

plan::HeldBytes Engine::held() const {
  const Ledger& l = impl_->context_.ledger;
  return {.main = l.held(Role::main), .runtime = l.held(Role::runtime), .gradient = l.held(Role::gradient),
          .main_gradient = l.held(Role::main_gradient), .accumulator = l.held(Role::accumulator),
          .state = l.held(Role::state), .slots = l.held(Role::slot),
          .unit_state = l.held(Role::unit_state), .staging = l.held(Role::staging),
          .workspace = l.held(Role::workspace)};
}

plan::HeldBytes Engine::predicted_held() const {
  return engine_detail::held_bytes(plan(), impl_->stepper_->update(), impl_->context_.rank());
}

const std::map<std::string, int64_t>& Engine::fragment_bytes_sent() const { return impl_->stepper_->sent(); }

std::map<std::string, int64_t> Engine::predicted_fragment_bytes() const {
  const engine_detail::UpdatePlan& update = impl_->stepper_->update();
  return plan::fragment_bytes(plan(), update.demands, update.owners, impl_->context_.rank());
}

void Engine::record_into(std::shared_ptr<Trace> trace) {
  impl_->runner_->check_idle("record_into");
  impl_->context_.trace = std::move(trace);
}

std::string Engine::owner_report() const {
  const engine_detail::UpdatePlan& update = impl_->stepper_->update();
  return plan::owner_report(plan(), update.demands, update.owners);
}

}  // namespace dovetail

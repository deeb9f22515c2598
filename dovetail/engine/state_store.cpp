#include "dovetail/engine/state_store.h"

#include <algorithm>
#include <numeric>

#include "dovetail/base/error.h"

namespace dovetail::engine_detail {
namespace {

void fill(std::byte* data, DType dtype, int64_t count, float value) {
  if (value == 0) return;  // new memory is zero
  if (dtype == DType::u8) {
    std::fill_n(reinterpret_cast<uint8_t*>(data), count, static_cast<uint8_t>(value));
    return;
  }
  if (dtype != DType::f32)
    raise<ConfigError>("optimizer: state of dtype {} can start at 0 only, got {}", name_of(dtype),
                       value);
  std::fill_n(reinterpret_cast<float*>(data), count, value);
}

}  // namespace

StateStore::StateStore(Context& context, const std::vector<std::unique_ptr<ShardGroup>>& groups,
                       const UpdatePlan& update)
    : context_(context),
      groups_(groups),
      update_(update),
      buffers_(groups.size()),
      unit_buffers_(groups.size()),
      ranges_(context.plan.tensors.size()),
      unit_fields_(update.owners.units.size()) {
  std::vector<std::vector<int64_t>> owned(groups.size());
  for (const plan::UnitBatch& b : update.batches)
    for (int64_t u = b.begin; u < b.end; ++u)
      if (plan::role_of(context.plan, update.owners.units[u], context.rank()).owner)
        owned[b.group].push_back(u);
  for (int64_t g = 0; g < std::ssize(groups); ++g) allocate(g, owned[g]);
}

void StateStore::allocate(int64_t g, const std::vector<int64_t>& owned) {
  std::map<Key, int64_t> bytes, unit_bytes;
  for (const GroupParameter& p : groups_[g]->parameters())
    for (const StateField& f : update_.updates[p.index].state) {
      if (f.per == StateField::Per::unit) continue;
      Range range{.field = &f,
                  .buffer = nullptr,
                  .offset = bytes[{f.name, f.dtype}],
                  .values = f.values_in(p.chain.held(Level::zero1)).size()};
      bytes[{f.name, f.dtype}] += range.values * size_of(f.dtype);
      ranges_[p.index].emplace(f.name, range);
    }
  auto each_unit_field = [&](auto&& visit) {  // visit(unit, field, values)
    for (int64_t u : owned) {
      const plan::OwnedUnit& unit = update_.owners.units[u];
      for (const StateField& f : update_.unit_state[unit.demand])
        visit(u, f, f.unit_values[unit.number]);
    }
  };
  each_unit_field([&](int64_t, const StateField& f, int64_t n) {
    unit_bytes[{f.name, f.dtype}] += n * size_of(f.dtype);
  });

  for (const auto& [key, n] : bytes)
    buffers_[g][key] = Buffer(context_.allocator, context_.ledger, n, Role::state);
  for (const auto& [key, n] : unit_bytes)
    unit_buffers_[g][key] = Buffer(context_.allocator, context_.ledger, n, Role::unit_state);

  for (const GroupParameter& p : groups_[g]->parameters())
    for (auto& [name, range] : ranges_[p.index]) {
      range.buffer = &buffers_[g].at({name, range.field->dtype});
      if (range.values > 0)
        fill(range.buffer->data() + range.offset, range.field->dtype, range.values,
             range.field->initial);
    }
  std::map<Key, int64_t> at;
  each_unit_field([&](int64_t u, const StateField& f, int64_t n) {
    const Key key{f.name, f.dtype};
    std::byte* data = unit_buffers_[g].at(key).data() + at[key];
    at[key] += n * size_of(f.dtype);
    fill(data, f.dtype, n, f.initial);
    unit_fields_[u].push_back({f.name, f.dtype, data, n});
  });
}

Field StateStore::field(const ShardGroup& group, const GroupParameter& p,
                        std::string_view name) const {
  const int64_t own = p.chain.held(Level::zero1).size();
  if (name == kWeight) return {kWeight, context_.plan.options.main, group.main_at(p), own};
  if (name == kGrad)
    return {kGrad, DType::f32, reinterpret_cast<std::byte*>(group.main_gradient_at(p)), own};
  const auto it = ranges_[p.index].find(name);
  DT_CHECK(it != ranges_[p.index].end(), "field {} of {}", name,
           context_.plan.tensors[p.index].name);
  const Range& r = it->second;
  return {r.field->name, r.field->dtype, r.buffer->data() + r.offset, r.values};
}

void StateStore::list(ShardedState& out) const {
  const bool writer = context_.position.replica == 0;
  for (int64_t g = 0; g < std::ssize(groups_); ++g) {
    const auto& group = groups_[g];
    for (const GroupParameter& p : group->parameters()) {
      const TensorSpec& spec = context_.plan.tensors[p.index];
      const Interval own = p.chain.held(Level::zero1);
      out.push_back({.tensor = spec.name,
                     .field = std::string(kWeight),
                     .shape = spec.shape,
                     .dtype = context_.plan.options.main,
                     .elements = own,
                     .data = group->main_at(p),
                     .writer = writer,
                     .owner = group->main_memory(p).owner});
      for (const StateField& f : update_.updates[p.index].state) {
        out.push_back({.tensor = spec.name,
                       .field = f.name,
                       .shape = f.per == StateField::Per::element
                                    ? spec.shape
                                    : std::vector<int64_t>{f.values(spec)},
                       .dtype = f.dtype,
                       .elements = {},
                       .data = nullptr,
                       .writer = writer,
                       .per_unit = f.per == StateField::Per::unit});
        // An entry without elements stays for a field per unit, so that all ranks list the same.
        if (f.per == StateField::Per::unit) {
          list_units(g, p.index, f, out);
        } else {
          out.back().elements = f.values_in(own);
          out.back().data = field(*group, p, f.name).data;
          out.back().owner = ranges_[p.index].at(f.name).buffer->memory().owner;
        }
      }
    }
  }
}

void StateStore::list_units(int64_t group, int64_t tensor, const StateField& f, ShardedState& out) const {
  const StateEntry empty = out.back();
  for (int64_t u = 0; u < std::ssize(unit_fields_); ++u) {
    const plan::OwnedUnit& unit = update_.owners.units[u];
    if (update_.demands[unit.demand].tensor != tensor) continue;
    for (const Field& here : unit_fields_[u]) {
      if (here.name != f.name) continue;
      const auto first = std::accumulate(f.unit_values.begin(), f.unit_values.begin() + unit.number,
                                         int64_t{0});
      out.push_back(empty);
      out.back().elements = {first, first + here.size};
      out.back().data = here.data;
      out.back().owner = unit_buffers_[group].at({f.name, f.dtype}).memory().owner;
      // A unit that replicas share is held by its owner alone.
      out.back().writer = empty.writer || unit.replica != plan::kEveryReplica;
    }
  }
}

}  // namespace dovetail::engine_detail

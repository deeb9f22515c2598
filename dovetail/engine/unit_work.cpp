#include "dovetail/engine/unit_work.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"
#include "dovetail/numerics/bf16.h"

namespace dovetail::engine_detail {
namespace {

std::span<const float> floats(const std::byte* data, int64_t n) {
  return {reinterpret_cast<const float*>(data), static_cast<size_t>(n)};
}
std::span<float> floats(std::byte* data, int64_t n) {
  return {reinterpret_cast<float*>(data), static_cast<size_t>(n)};
}
std::span<const uint16_t> halves(const std::byte* data, int64_t n) {
  return {reinterpret_cast<const uint16_t*>(data), static_cast<size_t>(n)};
}
std::span<uint16_t> halves(std::byte* data, int64_t n) {
  return {reinterpret_cast<uint16_t*>(data), static_cast<size_t>(n)};
}

// n elements of a field from one form to another.
void copy_elements(const plan::UnitField& f, const std::byte* from, bool from_wire, std::byte* to,
                   bool to_wire, int64_t n) {
  const bool narrow_from = from_wire && f.wire != f.bytes, narrow_to = to_wire && f.wire != f.bytes;
  if (narrow_from == narrow_to)
    std::memcpy(to, from, n * (narrow_from ? f.wire : f.bytes));
  else if (narrow_to)
    encode_bf16(floats(from, n), halves(to, n));
  else
    decode_bf16(halves(from, n), floats(to, n));
}

}  // namespace

UnitWork::UnitWork(UnitEnvironment& environment, size_t batch)
    : env_(environment),
      batch_(environment.update.batches[batch]),
      staged_(plan::stage(environment.context.plan, environment.update.demands,
                          environment.update.owners, batch_, environment.context.rank())) {}

UnitWork::Part UnitWork::part_of(int64_t unit, size_t field) const {
  const plan::OwnedUnit& u = env_.update.owners.units[unit];
  const plan::UnitDemand& demand = env_.update.demands[u.demand];
  const plan::UnitStaging& s = staged_.units[unit - batch_.begin];
  const ParameterPlace& place = env_.places[demand.tensor];
  auto staged = [&](int64_t offset) { return offset < 0 ? nullptr : staging_ + offset; };
  return {.unit = &u,
          .field = &demand.fields[field],
          .role = s.role,
          .place = &demand.places[u.number],
          .packed = staged(s.packed[field]),
          .wire = staged(s.wire[field]),
          .local = env_.state.field(*place.group, *place.parameter, demand.fields[field].name),
          .local_begin = place.parameter->chain.held(Level::zero1).begin};
}

// In the order in which messages are listed, of the units that take part.
template <class Visit>
void UnitWork::each_part(Visit&& visit) const {
  for (int64_t u = batch_.begin; u < batch_.end; ++u) {
    if (!takes_part_[u - batch_.begin]) continue;
    const size_t fields = env_.update.demands[env_.update.owners.units[u].demand].fields.size();
    for (size_t f = 0; f < fields; ++f) visit(part_of(u, f));
  }
}

std::span<std::byte> UnitWork::local_run(const Part& p, Interval packed) const {
  const IntervalList runs = p.place->runs(packed);
  DT_CHECK_EQ(runs.size(), 1u);
  const int64_t size = p.field->bytes;
  return {p.local.data + (runs[0].begin - p.local_begin) * size,
          static_cast<size_t>(runs[0].size() * size)};
}

void UnitWork::gather_local(const Part& p, Interval packed, std::byte* to, bool as_wire) const {
  for (Interval run : p.place->runs(packed)) {
    copy_elements(*p.field, p.local.data + (run.begin - p.local_begin) * p.field->bytes, false, to,
                  as_wire, run.size());
    to += run.size() * (as_wire ? p.field->wire : p.field->bytes);
  }
}

void UnitWork::scatter_local(const Part& p, Interval packed, const std::byte* from,
                             bool from_wire) const {
  for (Interval run : p.place->runs(packed)) {
    copy_elements(*p.field, from, from_wire,
                  p.local.data + (run.begin - p.local_begin) * p.field->bytes, false, run.size());
    from += run.size() * (from_wire ? p.field->wire : p.field->bytes);
  }
}

void UnitWork::run(std::vector<comm::Send>& sends, std::vector<comm::Receive>& receives) {
  work_ = env_.context.ranks.world->exchange(
      sends, receives, env_.context.identity(comm::Phase::fragment, batch_.group));
}

void UnitWork::start(std::byte* staging, const std::vector<bool>& takes_part) {
  staging_ = staging;
  takes_part_.clear();
  for (int64_t u = batch_.begin; u < batch_.end; ++u)
    takes_part_.push_back(
        takes_part[env_.update.demands[env_.update.owners.units[u].demand].tensor]);

  const plan::Degrees& degrees = env_.context.degrees();
  const int64_t me = env_.context.rank(), replica = env_.context.position.replica;
  std::vector<comm::Send> sends;
  std::vector<comm::Receive> receives;
  each_part([&](const Part& p) {
    if (!p.field->reads) return;
    const bool own_replica = p.unit->replica == plan::kEveryReplica || p.unit->replica == replica;
    if (!own_replica) return;  // the owner reads from holders of its own replica
    const int64_t owner = plan::rank_of(degrees, p.unit->owner, replica);
    for (const plan::UnitFragment& f : p.unit->fragments) {
      const int64_t holder = plan::rank_of(degrees, f.shard, replica), n = f.packed.size();
      if (holder == owner || (me != holder && me != owner)) continue;
      if (me == holder) {
        if (p.wire) gather_local(p, f.packed, p.wire, true);
        const std::span<const std::byte> bytes =
            p.wire ? std::span<const std::byte>(p.wire, n * p.field->wire) : local_run(p, f.packed);
        sends.push_back({static_cast<int>(owner), bytes});
        env_.sent[p.field->name] += n * p.field->wire;
      } else {
        std::byte* to = p.wire ? p.wire + f.packed.begin * p.field->wire
                               : p.packed + f.packed.begin * p.field->bytes;
        receives.push_back(
            {static_cast<int>(holder), {to, static_cast<size_t>(n * p.field->wire)}});
      }
    }
  });
  run(sends, receives);
}

void UnitWork::round_in_place(const Part& p) const {
  if (p.field->wire == p.field->bytes) return;
  for (Interval run : p.place->runs({0, p.place->numel()}))
    round_to_bf16(floats(p.local.data + (run.begin - p.local_begin) * p.field->bytes, run.size()));
}

void UnitWork::run_unit(int64_t unit, const StepContext& step) {
  const plan::OwnedUnit& u = env_.update.owners.units[unit];
  const plan::UnitDemand& demand = env_.update.demands[u.demand];
  const UnitPlace& place = demand.places[u.number];
  const UpdateOp& op = *env_.ops[demand.op];
  const TensorSpec& spec = env_.context.plan.tensors[demand.tensor];
  const int64_t stride = u.whole_at_owner() ? place.stride : place.columns;
  std::vector<Field> fields;
  for (size_t f = 0; f < demand.fields.size(); ++f) {
    const Part p = part_of(unit, f);
    std::byte* data = p.packed;
    if (u.whole_at_owner()) {
      data = p.local.data + (place.first - p.local_begin) * p.field->bytes;
      if (p.field->reads) round_in_place(p);
    } else if (p.field->reads) {
      for (const plan::UnitFragment& fragment : u.fragments) {
        const int64_t begin = fragment.packed.begin, n = fragment.packed.size();
        std::byte* to = p.packed + begin * p.field->bytes;
        if (fragment.shard == u.owner) {
          if (p.wire)
            gather_local(p, fragment.packed, p.wire + begin * p.field->wire, true);
          else
            gather_local(p, fragment.packed, to, false);
        }
        if (p.wire) copy_elements(*p.field, p.wire + begin * p.field->wire, true, to, false, n);
      }
    }
    fields.push_back(
        {p.local.name, p.local.dtype, data, (place.rows - 1) * stride + place.columns});
  }
  const std::vector<Field>& own_state = env_.state.unit_fields(unit);
  fields.insert(fields.end(), own_state.begin(), own_state.end());
  op.run({.tensor = &spec,
          .index = demand.tensor,
          .place = place,
          .unit = u.number,
          .row_stride = stride,
          .fields = fields,
          .workspace = env_.workspace.first(demand.workspace[u.number])},
         step);
  for (size_t f = 0; f < demand.fields.size(); ++f) {
    const Part p = part_of(unit, f);
    if (!p.field->writes) continue;
    if (u.whole_at_owner()) {
      round_in_place(p);
      if (p.wire) gather_local(p, {0, place.numel()}, p.wire, true);
      continue;
    }
    if (p.wire) copy_elements(*p.field, p.packed, false, p.wire, true, place.numel());
    for (const plan::UnitFragment& fragment : u.fragments)
      if (fragment.shard == u.owner) {
        const int64_t size = p.wire ? p.field->wire : p.field->bytes;
        scatter_local(p, fragment.packed,
                      (p.wire ? p.wire : p.packed) + fragment.packed.begin * size,
                      p.wire != nullptr);
      }
  }
}

void UnitWork::compute(const StepContext& step) {
  work_->wait();
  for (int64_t u = batch_.begin; u < batch_.end; ++u)
    if (takes_part_[u - batch_.begin] && staged_.units[u - batch_.begin].role.owner)
      run_unit(u, step);

  const plan::Degrees& degrees = env_.context.degrees();
  const int64_t me = env_.context.rank(), replica = env_.context.position.replica;
  const int64_t replicas = env_.context.plan.options.world / degrees.zero1;
  std::vector<comm::Send> sends;
  std::vector<comm::Receive> receives;
  each_part([&](const Part& p) {
    if (!p.field->writes) return;
    const bool repeated = p.unit->replica == plan::kEveryReplica;
    const int64_t owner = plan::rank_of(degrees, p.unit->owner, repeated ? replica : p.unit->replica);
    for (const plan::UnitFragment& f : p.unit->fragments) {
      const int64_t n = f.packed.size();
      auto bytes = [&](const std::byte* at) {
        return std::span<const std::byte>(at, n * p.field->wire);
      };
      for (int64_t r = repeated ? replica : 0; r < (repeated ? replica + 1 : replicas); ++r) {
        const int64_t holder = plan::rank_of(degrees, f.shard, r);
        if (holder == owner) continue;
        if (me == owner) {
          const std::byte* from = p.wire     ? p.wire + f.packed.begin * p.field->wire
                                  : p.packed ? p.packed + f.packed.begin * p.field->bytes
                                             : local_run(p, f.packed).data();
          sends.push_back({static_cast<int>(holder), bytes(from)});
          env_.sent[p.field->name] += n * p.field->wire;
        } else if (me == holder) {
          std::byte* to = p.wire ? p.wire : local_run(p, f.packed).data();
          receives.push_back(
              {static_cast<int>(owner), {to, static_cast<size_t>(n * p.field->wire)}});
        }
      }
    }
  });
  run(sends, receives);
}

void UnitWork::finish() {
  work_->wait();
  each_part([&](const Part& p) {
    if (!p.field->writes || p.role.owner || p.role.fragment < 0 || !p.wire) return;
    scatter_local(p, p.unit->fragments[p.role.fragment].packed, p.wire, true);
  });
}

}  // namespace dovetail::engine_detail

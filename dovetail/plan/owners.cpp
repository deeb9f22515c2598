#include "dovetail/plan/owners.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <tuple>

#include "dovetail/base/error.h"

namespace dovetail::plan {
namespace {

std::vector<UnitFragment> fragments_at(const TensorPlace& at, const UnitPlace& place) {
  const SegmentLayout& s = *at.segment;
  const Interval span = place.span();
  std::vector<UnitFragment> fragments;
  if (span.empty()) return fragments;
  const int64_t offset = at.placement->offset, last = s.zero1_shard_at(offset + span.end - 1);
  for (int64_t q = s.zero1_shard_at(offset + span.begin); q <= last; ++q) {
    const Interval packed = place.packed_in(s.zero1_interval(q).shifted(-offset));
    if (!packed.empty()) fragments.push_back({q, packed});
  }
  return fragments;
}

// The loads of all ranks, (shard, replica), so that the least is at hand.
class Loads {
 public:
  Loads(int64_t shards, int64_t replicas) : replicas_(replicas), load_(shards * replicas) {
    for (int64_t i = 0; i < std::ssize(load_); ++i) order_.insert({0, i});
  }

  double at(int64_t shard, int64_t replica) const { return load_[shard * replicas_ + replica]; }
  void add(int64_t shard, int64_t replica, double work) {
    const int64_t i = shard * replicas_ + replica;
    order_.erase({load_[i], i});
    load_[i] += work;
    order_.insert({load_[i], i});
  }
  std::pair<int64_t, int64_t> least() const {
    const int64_t i = order_.begin()->second;
    return {i / replicas_, i % replicas_};
  }
  int64_t replicas() const { return replicas_; }

 private:
  int64_t replicas_;
  std::vector<double> load_;
  std::set<std::pair<double, int64_t>> order_;
};

class Assignment {
 public:
  Assignment(const std::vector<UnitDemand>& demands, const OwnerOptions& options, Loads& loads)
      : demands_(demands), options_(options), loads_(loads) {}

  void assign(OwnedUnit& unit) {
    const UnitDemand& demand = demands_[unit.demand];
    const double cost = demand.cost[unit.number];
    const auto numel = static_cast<double>(demand.places[unit.number].numel());
    const double result = numel * static_cast<double>(demand.wire_out()) * options_.flops_per_byte;
    const bool shared = loads_.replicas() > 1 && cost > result;
    best_ = {std::numeric_limits<double>::infinity(), 0, 0, 0, 0};
    for (const UnitFragment& f : unit.fragments)
      consider(unit, f.shard, f.packed.size(), f.packed.begin, shared);
    const auto [shard, replica] = loads_.least();
    if (std::none_of(unit.fragments.begin(), unit.fragments.end(),
                     [&](const auto& f) { return f.shard == shard; }))
      consider(unit, shard, 0, demand.places[unit.number].numel(), shared);
    unit.owner = std::get<3>(best_);
    unit.replica = shared ? std::get<4>(best_) : kEveryReplica;
    for (int64_t r = 0; r < loads_.replicas(); ++r)
      if (!shared || r == unit.replica) loads_.add(unit.owner, r, cost);
  }

 private:
  // Finish, then minus the elements held, then the first of them, then shard and replica.
  using Choice = std::tuple<double, int64_t, int64_t, int64_t, int64_t>;

  double transfer(const OwnedUnit& unit, int64_t kept) const {
    const UnitDemand& demand = demands_[unit.demand];
    const auto moved = static_cast<double>(demand.places[unit.number].numel() - kept);
    return moved * static_cast<double>(demand.wire_in() + demand.wire_out()) *
           options_.flops_per_byte;
  }

  void consider(const OwnedUnit& unit, int64_t shard, int64_t kept, int64_t first, bool shared) {
    const double work = demands_[unit.demand].cost[unit.number] + transfer(unit, kept);
    for (int64_t r = 0; r < (shared ? loads_.replicas() : 1); ++r)
      best_ = std::min(best_, Choice{loads_.at(shard, r) + work, -kept, first, shard, r});
  }

  const std::vector<UnitDemand>& demands_;
  const OwnerOptions& options_;
  Loads& loads_;
  Choice best_;
};

// Calls visit(from rank, to rank, elements) for each move of a unit: fragments in, then results
// out.
template <class In, class Out>
void for_moves(const Plan& plan, const OwnedUnit& u, In&& in, Out&& out) {
  const Degrees& d = plan.options.degrees;
  const int64_t replicas = plan.options.world / d.zero1;
  for (int64_t r = 0; r < replicas; ++r) {
    const bool owns = u.replica == kEveryReplica || u.replica == r;
    const int64_t owner = rank_of(d, u.owner, u.replica == kEveryReplica ? r : u.replica);
    for (const UnitFragment& f : u.fragments) {
      const int64_t holder = rank_of(d, f.shard, r);
      if (holder == owner) continue;
      if (owns) in(holder, owner, f.packed.size());
      out(owner, holder, f.packed.size());
    }
  }
}

}  // namespace

int64_t UnitDemand::wire_in() const {
  return std::accumulate(fields.begin(), fields.end(), int64_t{0},
                         [](int64_t n, const UnitField& f) { return n + (f.reads ? f.wire : 0); });
}

int64_t UnitDemand::wire_out() const {
  return std::accumulate(fields.begin(), fields.end(), int64_t{0},
                         [](int64_t n, const UnitField& f) { return n + (f.writes ? f.wire : 0); });
}

double OwnerPlan::imbalance() const {
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  return sum == 0
             ? 1
             : *std::max_element(load.begin(), load.end()) * static_cast<double>(load.size()) / sum;
}

std::vector<UnitFragment> fragments_of(const Plan& plan, int64_t tensor, const UnitPlace& place) {
  return fragments_at(tensor_places(plan).at(tensor), place);
}

OwnerPlan assign_owners(const Plan& plan, const std::vector<UnitDemand>& demands,
                        const OwnerOptions& options) {
  const Degrees& d = plan.options.degrees;
  const int64_t replicas = plan.options.world / d.zero1;
  const std::vector<TensorPlace> tensors = tensor_places(plan);
  OwnerPlan owners;
  for (int64_t i = 0; i < std::ssize(demands); ++i) {
    const UnitDemand& demand = demands[i];
    const TensorSpec& t = plan.tensors.at(demand.tensor);
    DT_CHECK_EQ(demand.cost.size(), demand.places.size(), "{}", t.name);
    DT_CHECK_EQ(demand.state.size(), demand.places.size(), "{}", t.name);
    DT_CHECK_EQ(demand.workspace.size(), demand.places.size(), "{}", t.name);
    for (int64_t n = 0; n < std::ssize(demand.places); ++n) {
      if (!Interval{0, t.numel()}.contains(demand.places[n].span()))
        raise<ConfigError>("{}: unit {} lies outside of its {} elements", t.name, n, t.numel());
      if (!(demand.cost[n] >= 0 && demand.cost[n] < 1e30))
        raise<ConfigError>("{}: wanted a finite cost of at least 0 for unit {}, got {}", t.name, n,
                           demand.cost[n]);
      if (demand.places[n].numel() == 0) continue;
      owners.units.push_back({.demand = i,
                              .number = n,
                              .fragments = fragments_at(tensors[demand.tensor], demand.places[n])});
    }
  }
  auto group_of = [&](const OwnedUnit& u) { return tensors[demands[u.demand].tensor].group; };
  auto place = [&](const OwnedUnit& u) {
    const UnitDemand& demand = demands[u.demand];
    return std::tuple(group_of(u), demand.op, demand.tensor, u.number);
  };
  std::sort(owners.units.begin(), owners.units.end(),
            [&](const OwnedUnit& a, const OwnedUnit& b) { return place(a) < place(b); });

  std::vector<int64_t> order(owners.units.size());
  std::iota(order.begin(), order.end(), 0);
  auto cost = [&](int64_t i) {
    return demands[owners.units[i].demand].cost[owners.units[i].number];
  };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::pair(group_of(owners.units[a]), -cost(a)) <
           std::pair(group_of(owners.units[b]), -cost(b));
  });
  Loads loads(d.zero1, replicas);
  Assignment assignment(demands, options, loads);
  for (int64_t i : order) assignment.assign(owners.units[i]);

  owners.load.assign(plan.options.world, 0);
  for (int64_t i = 0; i < std::ssize(owners.units); ++i) {
    const OwnedUnit& u = owners.units[i];
    for (int64_t r = 0; r < replicas; ++r)
      if (u.replica == kEveryReplica || u.replica == r)
        owners.load[rank_of(d, u.owner, r)] += cost(i);
  }
  return owners;
}

std::map<std::string, int64_t> fragment_bytes(const Plan& plan,
                                              const std::vector<UnitDemand>& demands,
                                              const OwnerPlan& owners, int64_t rank) {
  std::map<std::string, int64_t> bytes;
  for (const OwnedUnit& u : owners.units) {
    const UnitDemand& demand = demands[u.demand];
    for (const UnitField& f : demand.fields)
      for_moves(
          plan, u,
          [&](int64_t from, int64_t, int64_t n) {
            if (f.reads && from == rank) bytes[f.name] += n * f.wire;
          },
          [&](int64_t from, int64_t, int64_t n) {
            if (f.writes && from == rank) bytes[f.name] += n * f.wire;
          });
  }
  return bytes;
}

std::string owner_report(const Plan& plan, const std::vector<UnitDemand>& demands,
                         const OwnerPlan& owners) {
  const Degrees& d = plan.options.degrees;
  std::map<std::string, int64_t> bytes;
  for (int64_t r = 0; r < plan.options.world; ++r)
    for (const auto& [name, n] : fragment_bytes(plan, demands, owners, r)) bytes[name] += n;
  std::string text =
      fmt::format("{} units, imbalance {:.3f}\n", owners.units.size(), owners.imbalance());
  for (const auto& [name, n] : bytes)
    text += fmt::format("field {}: {} bytes sent by all ranks\n", name, n);
  for (int64_t r = 0; r < plan.options.world; ++r)
    text += fmt::format("rank {}: {:.4g} flops\n", r, owners.load[r]);
  for (const OwnedUnit& u : owners.units) {
    if (u.whole_at_owner()) continue;
    const UnitDemand& demand = demands[u.demand];
    text += fmt::format("{} unit {}: owner {}, fragments", plan.tensors[demand.tensor].name,
                        u.number, rank_of(d, u.owner, std::max<int64_t>(0, u.replica)));
    for (const UnitFragment& f : u.fragments)
      text += fmt::format(" {}:{}", rank_of(d, f.shard, 0), f.packed.size());
    text += "\n";
  }
  return text;
}

}  // namespace dovetail::plan

#include "dovetail/engine/context.h"

namespace dovetail::engine_detail {

RankGroups make_rank_groups(std::shared_ptr<comm::Group> world, const plan::Degrees& degrees) {
  const int64_t size = world->size();
  plan::validate(degrees, size);
  RankGroups r;
  auto split = [&](plan::RankGroup kind) { return world->split(plan::rank_groups(degrees, size, kind)); };
  r.gather = split(plan::RankGroup::gather);
  r.reduce = split(plan::RankGroup::reduce);
  r.refresh = split(plan::RankGroup::refresh);
  r.reduce_main = split(plan::RankGroup::reduce_main);
  r.replica = split(plan::RankGroup::replica);
  r.main = split(plan::RankGroup::main);
  r.world = std::move(world);
  return r;
}

Memory PeerAllocator::allocate(int64_t bytes, Role) {
  std::shared_ptr<std::byte> piece = memory_.allocate(bytes);
  std::byte* data = piece.get();
  return {std::move(piece), data, bytes};
}

std::string_view Context::label_of(int64_t group) const {
  const std::string& name = plan.groups[group].name;
  return name.empty() ? std::string_view("root") : std::string_view(name);
}

comm::Identity Context::identity(comm::Phase phase, int64_t group) const {
  comm::Identity id;
  id.phase = phase;
  id.unit = static_cast<int32_t>(group);
  id.step = steps;
  if (group >= 0) id.label = label_of(group);
  return id;
}

}  // namespace dovetail::engine_detail

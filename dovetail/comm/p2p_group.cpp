#include "dovetail/comm/p2p_group.h"

#include <cstring>
#include <numeric>

#include "dovetail/comm/arguments.h"
#include "dovetail/comm/p2p_operation.h"

namespace dovetail::comm {
namespace {

// "[0 2] [1 3]"
std::string text_of(std::span<const int32_t> lists) {
  std::string text;
  for (size_t i = 0; i < lists.size();) {
    const int32_t n = lists[i++];
    text += text.empty() ? "[" : " [";
    for (int32_t k = 0; k < n && i < lists.size(); ++k, ++i) text += fmt::format("{}{}", k ? " " : "", lists[i]);
    text += "]";
  }
  return text;
}

std::vector<int32_t> flatten(const std::vector<std::vector<int>>& groups) {
  std::vector<int32_t> flat;
  for (const auto& g : groups) {
    flat.push_back(static_cast<int32_t>(g.size()));
    flat.insert(flat.end(), g.begin(), g.end());
  }
  return flat;
}

}  // namespace

P2PGroup::P2PGroup(std::shared_ptr<P2PMembers> members) : members_(std::move(members)) {}

int P2PGroup::rank() const { return members_->rank; }
std::span<const int> P2PGroup::global_ranks() const { return members_->ranks; }
std::string P2PGroup::transport() const { return members_->world->transport(); }
bool P2PGroup::needs_gather_buffer() const { return members_->size() > 1; }
std::chrono::nanoseconds P2PGroup::blocked() const { return members_->world->blocked(); }
const Counters& P2PGroup::counters() const { return members_->world->counters(); }
std::chrono::milliseconds P2PGroup::deadline() const { return members_->world->deadline(); }
void P2PGroup::fail(std::string_view reason) noexcept { members_->world->fail(reason); }

Gathered P2PGroup::all_gather(std::span<const GatherPlane> planes, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  for (const GatherPlane& plane : planes) check_gather(plane, size);
  Gathered result;
  if (size == 1) {
    members_->world->check();
    for (const GatherPlane& plane : planes) result.whole.push_back(plane.shard - plane.slices[0].begin);
    result.work = finished_work();
    return result;
  }
  auto operation = std::make_unique<P2POperation>(members_, Operation::all_gather, id);
  for (const GatherPlane& plane : planes) {
    const size_t own = static_cast<size_t>(plane.slices[me].size());
    std::byte* const place = plane.whole + plane.slices[me].begin;
    if (own > 0 && plane.shard != place) std::memcpy(place, plane.shard, own);
    for (int i = 1; i < size; ++i) {
      const int to = (me + i) % size, from = (me - i + size) % size;
      operation->receive(from,
                         {plane.whole + plane.slices[from].begin, static_cast<size_t>(plane.slices[from].size())});
      operation->send(to, {place, own});
    }
    result.whole.push_back(plane.whole);
  }
  operation->post();
  result.work = std::move(operation);
  return result;
}

int64_t P2PGroup::reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const {
  check_slices(slices, members_->size());
  return (members_->size() - 1) * padded_bytes(slices[members_->rank].size() * size_of(dtype));
}

WorkHandle P2PGroup::reduce_scatter(const ReduceScatter& request, const Identity& id) {
  check_reduce(request, members_->size(), reduce_scratch_bytes(request.dtype, request.slices));
  if (members_->size() == 1) {
    members_->world->check();
    reduce_alone(request);
    return finished_work();
  }
  auto operation = std::make_unique<P2PReduceScatter>(members_, request, id);
  operation->post();
  return operation;
}

int64_t P2PGroup::all_reduce_scratch_bytes(int64_t elements) const {
  const int size = members_->size();
  return size == 1 ? 0 : size * padded_bytes(P2PReduction::slice(elements, size, 0).size() * 4);
}

WorkHandle P2PGroup::all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) {
  const int64_t wanted = all_reduce_scratch_bytes(static_cast<int64_t>(data.size()));
  DT_CHECK_GE(static_cast<int64_t>(scratch.size()), wanted, "scratch of an all_reduce");
  if (members_->size() == 1) {
    members_->world->check();
    return finished_work();
  }
  auto operation = std::make_unique<P2PReduction>(members_, data, scratch, id);
  operation->post_staged();
  return operation;
}

WorkHandle P2PGroup::exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) {
  const int size = members_->size(), me = members_->rank;
  for (const Send& s : sends) DT_CHECK(s.to >= 0 && s.to < size, "send to member {} of {}", s.to, size);
  for (const Receive& r : receives)
    DT_CHECK(r.from >= 0 && r.from < size, "receive from member {} of {}", r.from, size);
  copy_own(sends, receives, me);
  if (size == 1) {
    members_->world->check();
    return finished_work();
  }
  auto operation = std::make_unique<P2POperation>(members_, Operation::exchange, id);
  for (const Receive& r : receives) {
    if (r.from != me) operation->receive(r.from, r.bytes);
  }
  for (const Send& s : sends) {
    if (s.to != me) operation->send(s.to, s.bytes);
  }
  operation->post();
  return operation;
}

std::vector<std::vector<std::byte>> P2PGroup::gather_bytes(std::span<const std::byte> mine, const Identity& id) {
  P2PGatherBytes operation(members_, Operation::gather_bytes, mine, id);
  operation.post();
  operation.wait();
  return operation.take();
}

void P2PGroup::barrier(const Identity& id) {
  P2POperation operation(members_, Operation::barrier, id);
  operation.post();
  operation.wait();
}

std::unique_ptr<Group> P2PGroup::split(const std::vector<std::vector<int>>& groups) {
  return std::make_unique<P2PGroup>(split_members(groups));
}

std::shared_ptr<P2PMembers> P2PGroup::split_members(const std::vector<std::vector<int>>& groups) {
  const int list = check_split(groups, members_->size(), members_->rank);
  std::vector<int32_t> mine = flatten(groups);
  mine.push_back(static_cast<int32_t>(members_->world->next_group()));
  P2PGatherBytes operation(members_, Operation::split, std::as_bytes(std::span(mine)), Identity{.label = "split"});
  operation.post();
  operation.wait();
  int32_t number = 0;
  const auto all = operation.take();
  for (size_t m = 0; m < all.size(); ++m) {
    std::vector<int32_t> theirs(all[m].size() / 4);
    if (!theirs.empty()) std::memcpy(theirs.data(), all[m].data(), theirs.size() * 4);
    const std::span ours(mine.data(), mine.size() - 1), lists(theirs.data(), theirs.empty() ? 0 : theirs.size() - 1);
    if (!std::ranges::equal(ours, lists)) {
      const int me = members_->ranks[members_->rank], them = members_->ranks[m];
      members_->world->blame_pair(
          them, fmt::format("ranks {} and {} split a group differently: rank {}: {}; rank {}: {}", me, them, me,
                            text_of(ours), them, text_of(lists)));
    }
    number = std::max(number, theirs.back());
  }
  members_->world->use_group(static_cast<uint32_t>(number));
  std::vector<int> ranks;
  int rank = 0;
  for (int m : groups[list]) {
    if (m == members_->rank) rank = static_cast<int>(ranks.size());
    ranks.push_back(members_->ranks[m]);
  }
  return std::make_shared<P2PMembers>(members_->world, std::move(ranks), rank, static_cast<uint16_t>(number));
}

std::unique_ptr<Group> make_p2p_world(std::unique_ptr<Link> link, std::chrono::milliseconds deadline) {
  return std::make_unique<P2PGroup>(make_p2p_members(std::move(link), deadline));
}

std::shared_ptr<P2PMembers> make_p2p_members(std::unique_ptr<Link> link, std::chrono::milliseconds deadline) {
  std::vector<int> ranks(static_cast<size_t>(link->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const int rank = link->rank();
  auto world = std::make_shared<P2PWorld>(std::move(link), deadline);
  return std::make_shared<P2PMembers>(std::move(world), std::move(ranks), rank, 0);
}

}  // namespace dovetail::comm

#include "dovetail/comm/peer/peer_group.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "dovetail/base/cores.h"
#include "dovetail/base/error.h"
#include "dovetail/comm/arguments.h"
#include "dovetail/comm/peer/peer_operation.h"

namespace dovetail::comm {
namespace {

constexpr uint32_t kSetupTag = (1u << 29) + 1;  // beside that of a farewell (c10d/backend_link.cpp)

// Every rank's value of a plain type, over a link that no group uses yet.
template <class T>
std::vector<T> tell_all(Link& link, const T& mine, Clock::time_point until, const char* what) {
  const int size = link.size(), me = link.rank();
  std::vector<T> all(size, mine);
  std::vector<std::pair<int, TransferHandle>> transfers;
  for (int i = 1; i < size; ++i) {
    const int to = (me + i) % size, from = (me - i + size) % size;
    transfers.emplace_back(from, link.post_receive(from, kSetupTag, std::as_writable_bytes(std::span(&all[from], 1))));
    transfers.emplace_back(to, link.post_send(to, kSetupTag, std::as_bytes(std::span(&mine, 1))));
  }
  for (auto& [rank, transfer] : transfers) {
    if (transfer->wait(until) == Outcome::done) continue;
    const std::string state = link.describe(rank);
    const Fault first = link.report(
        {rank, fmt::format("rank {} did not answer while ranks {}{}", rank, what, state.empty() ? "" : ": " + state)});
    throw CommError(first.rank, first.reason);
  }
  return all;
}

int pidfd_of(int64_t process) { return static_cast<int>(::syscall(SYS_pidfd_open, process, 0)); }

int64_t machine_memory() { return static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGESIZE); }

// The size of the hosts where they are equal runs of consecutive ranks, else 1.
int run_length(const std::vector<ArenaHandle>& handles) {
  const int size = static_cast<int>(handles.size());
  int run = 1;
  while (run < size && handles[run].host == handles[0].host) ++run;
  if (size % run != 0) return 1;
  for (int r = 0; r < size; ++r) {
    if (handles[r].host != handles[r / run * run].host) return 1;
    if (r % run == 0 && r > 0 && handles[r].host == handles[r - 1].host) return 1;
  }
  return run;
}

bool every_rank_is_alone(const std::vector<ArenaHandle>& handles) {
  std::set<uint64_t> hosts;
  for (const ArenaHandle& h : handles) hosts.insert(h.host);
  return hosts.size() == handles.size();
}

// The bytes of an error that one rank tells all others; empty for none.
struct Word {
  char text[512] = {};
  void say(const char* what) {
    if (text[0] == '\0') std::strncpy(text, what, sizeof(text) - 1);
  }
};

}  // namespace

PeerGroup::PeerGroup(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, int host_ranks)
    : P2PGroup(std::move(members)),
      peers_(std::move(peers)),
      host_ranks_(host_ranks),
      addressable_(members_->size() > 1 &&
                   std::ranges::all_of(members_->ranks, [&](int r) { return peers_->local(r); })) {}

std::shared_ptr<std::byte> PeerGroup::allocate_together(int64_t bytes, const Identity& id) {
  if (members_->size() == 1) return peers_->mine().allocate(bytes);
  if (!addressable_) return Group::allocate_together(bytes, id);
  Peers::Address address;
  if (members_->rank == 0 && bytes > 0)
    address = peers_->address_of(peers_->mine().allocate_region(bytes, members_->size()));
  std::array<std::byte, sizeof(address) + sizeof(bytes)> mine{};
  std::memcpy(mine.data(), &address, sizeof(address));
  std::memcpy(mine.data() + sizeof(address), &bytes, sizeof(bytes));
  const auto all = gather_bytes(mine, id);
  for (int m = 0; m < members_->size(); ++m) {
    int64_t theirs = -1;
    if (all[m].size() == mine.size()) std::memcpy(&theirs, all[m].data() + sizeof(address), sizeof(theirs));
    DT_CHECK_EQ(theirs, bytes, "memory together of {}: bytes of member {} against this one's", id.describe(), m);
  }
  if (bytes == 0) return nullptr;
  std::memcpy(&address, all[0].data(), sizeof(address));
  std::shared_ptr<Arena> owner = peers_->arena(address.owner);
  return {peers_->at(address), [owner, bytes](std::byte* region) { Arena::release_region(*owner, region, bytes); }};
}

Gathered PeerGroup::all_gather(std::span<const GatherPlane> planes, const Identity& id) {
  auto is_in_place = [](const GatherPlane& p) { return !p.whole && p.slices.back().end > 0; };
  const bool in_place = addressable_ && std::ranges::any_of(planes, is_in_place);
  if (!in_place) return P2PGroup::all_gather(planes, id);
  auto operation = std::make_unique<P2POperation>(members_, Operation::all_gather, id);
  Gathered result;
  for (const GatherPlane& plane : planes) {
    check_slices(plane.slices, members_->size());
    const std::byte* whole = plane.shard - plane.slices[members_->rank].begin;
    const Peers::Address address = peers_->address_of(whole);
    DT_CHECK(plane.slices.back().end == 0 || (!plane.whole && address.owner >= 0),
             "{}: a shard in private memory, or a buffer for its whole beside planes without", id.describe());
    operation->agree(address.owner);
    operation->agree(address.offset);
    result.whole.push_back(whole);
  }
  operation->post();
  result.work = std::move(operation);
  return result;
}

int64_t PeerGroup::reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const {
  return addressable_ ? 0 : P2PGroup::reduce_scratch_bytes(dtype, slices);
}

WorkHandle PeerGroup::reduce_scatter(const ReduceScatter& request, const Identity& id) {
  if (!addressable_) return P2PGroup::reduce_scatter(request, id);
  check_reduce(request, members_->size(), 0);
  return std::make_unique<PeerReduceScatter>(members_, peers_, request, id);
}

int64_t PeerGroup::all_reduce_scratch_bytes(int64_t elements) const {
  if (!addressable_) return P2PGroup::all_reduce_scratch_bytes(elements);
  return padded_bytes(P2PReduction::slice(elements, members_->size(), 0).size() * 4);
}

WorkHandle PeerGroup::all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) {
  if (!addressable_) return P2PGroup::all_reduce(data, scratch, id);
  DT_CHECK_GE(static_cast<int64_t>(scratch.size()), all_reduce_scratch_bytes(static_cast<int64_t>(data.size())),
              "scratch of an all_reduce");
  return std::make_unique<PeerAllReduce>(members_, peers_, data, scratch, id);
}

std::unique_ptr<Group> PeerGroup::split(const std::vector<std::vector<int>>& groups) {
  return std::make_unique<PeerGroup>(split_members(groups), peers_, host_ranks_);
}

std::unique_ptr<Group> make_peer_world(std::unique_ptr<Link> below, const PeerOptions& options,
                                       std::chrono::milliseconds deadline) {
  const int size = below->size(), me = below->rank();
  const auto until = Clock::now() + deadline;
  const int64_t capacity = options.capacity > 0 ? options.capacity : 2 * machine_memory();
  // A rank without an arena goes along until all can hear of it.
  std::shared_ptr<Arena> mine;
  ArenaHandle handle;
  Word word;
  try {
    mine = Arena::create(capacity, Inbox::bytes(size));
    handle = mine->handle();
  } catch (const CommError& error) {
    word.say(error.what());
  }
  const auto offer = std::make_unique<std::shared_ptr<Arena>>(mine);
  handle.host = host_fingerprint();
  if (options.ranks_per_host > 0) handle.host += static_cast<uint64_t>(me / options.ranks_per_host) << 32;
  handle.shared = reinterpret_cast<uint64_t>(offer.get());
  const std::vector<ArenaHandle> handles = tell_all(*below, handle, until, "offered their memory to one another");

  if (size > 1 && every_rank_is_alone(handles)) {
    if (options.required)
      raise<ConfigError>("shared memory of ranks: wanted at least 2 of the {} ranks on one host, got each on its own",
                         size);
    return std::make_unique<P2PGroup>(make_p2p_members(std::move(below), deadline));
  }

  std::vector<std::shared_ptr<Arena>> arenas(size);
  std::vector<int> process_files(size, -1);
  int on_host = 0;
  try {
    for (int r = 0; r < size; ++r) {
      const ArenaHandle& theirs = handles[r];
      if (theirs.host != handle.host || theirs.capacity == 0) continue;
      ++on_host;
      if (theirs.process == handle.process) {
        arenas[r] = *reinterpret_cast<const std::shared_ptr<Arena>*>(theirs.shared);
      } else {
        arenas[r] = Arena::open(theirs);
        process_files[r] = pidfd_of(theirs.process);
      }
    }
  } catch (const CommError& error) {
    word.say(error.what());
  }
  auto peers = std::make_shared<Peers>(me, std::move(arenas), std::move(process_files));
  // Also keeps everybody's offer alive until all have taken it.
  const std::vector<Word> words = tell_all(*below, word, until, "mapped one another's memory");
  for (int r = 0; r < size; ++r) {
    if (words[r].text[0] == '\0') continue;
    const std::string reason = fmt::format("rank {}: {}", r, words[r].text);
    if (options.required) throw CommError(r, reason);
    auto members = make_p2p_members(std::move(below), deadline);
    members->world->set_transport(fmt::format("{}, as {}", members->world->transport(), reason));
    return std::make_unique<P2PGroup>(std::move(members));
  }

  const int host_ranks = run_length(handles);
  auto link = std::make_unique<PeerLink>(std::move(below), peers, on_host <= usable_cores());
  return std::make_unique<PeerGroup>(make_p2p_members(std::move(link), deadline), std::move(peers), host_ranks);
}

}  // namespace dovetail::comm

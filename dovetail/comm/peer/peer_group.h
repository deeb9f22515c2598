// A Group whose members address one another's memory: gathers move nothing, reductions read the peers' slices where
// they lie. Where members are on several hosts it is a P2PGroup over the same link. docs/peer.md says who may write
// what when.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/peer/peer_link.h"

namespace dovetail::comm {

class PeerGroup final : public P2PGroup {
 public:
  // `host_ranks`: of the world, see Group.
  PeerGroup(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, int host_ranks);

  int host_ranks() const override { return host_ranks_; }
  SharedMemory* shared_memory() const override { return host_ranks_ > 1 ? &peers_->mine() : nullptr; }
  std::shared_ptr<std::byte> allocate_together(int64_t bytes, const Identity& id) override;
  bool needs_gather_buffer() const override { return !addressable_ && P2PGroup::needs_gather_buffer(); }
  // With buffers for the whole, a copy of every slice from where it lies; without, a barrier. Sent then: nothing.
  Gathered all_gather(std::span<const GatherPlane> planes, const Identity& id) override;
  // Operands outside of shared_memory() are first copied into it.
  int64_t reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const override;
  WorkHandle reduce_scatter(const ReduceScatter& request, const Identity& id) override;
  int64_t all_reduce_scratch_bytes(int64_t elements) const override;
  WorkHandle all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) override;
  std::unique_ptr<Group> split(const std::vector<std::vector<int>>& groups) override;

 private:
  const std::shared_ptr<Peers> peers_;
  const int host_ranks_;
  const bool addressable_;  // all members, and more than one
};

struct PeerOptions {
  // Ranks 0..n-1 count as one host, n..2n-1 as the next, whatever the machines; 0: as the machines are.
  int ranks_per_host = 0;
  int64_t capacity = 0;  // of each rank's arena, address space; 0: twice the machine's memory
  // Where a rank's memory cannot be mapped by another of its host: true: an error on every rank; false: all bytes go
  // through `below`, and transport() says why.
  bool required = true;
};

// The world of all ranks of `below`, in which those of one host share memory. Collective. Throws CommError.
std::unique_ptr<Group> make_peer_world(std::unique_ptr<Link> below, const PeerOptions& options,
                                       std::chrono::milliseconds deadline);

}  // namespace dovetail::comm

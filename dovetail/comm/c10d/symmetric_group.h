// A Group over torch's symmetric memory, for the devices of one host: each member fetches what it needs from the
// others' memory, see symmetric_operation.h. The counterpart of comm/peer on CUDA; docs/peer.md says how it differs.
//
// All memory in requests is the device's. Calls return once all members have come, and never wait for the device; so
// ranks make the calls of all groups of a world in one order. Works are waited for by the caller's current stream, not
// by the host; results, and errors of the device, are seen there. One caller's stream at a time uses a world.
#pragma once

#include <memory>

#include "dovetail/comm/c10d/symmetric_operation.h"
#include "dovetail/comm/p2p_group.h"

namespace dovetail::comm {

class SymmetricGroup final : public P2PGroup {
 public:
  // The arena is mapped, or null in a world of one. ConfigError where the signal pads have no channel left: each split
  // of a world takes one, and none comes back.
  SymmetricGroup(std::shared_ptr<P2PMembers> members, std::shared_ptr<SymmetricArena> arena, at::Device device);

  // A rank's arena is an allocation of its own device, mapped on its own: no run of addresses holds the shards of
  // several ranks, so gathers need buffers and host_ranks() stays 1, although operands are read in place.
  SharedMemory* shared_memory() const override { return arena_.get(); }
  Gathered all_gather(std::span<const GatherPlane> planes, const Identity& id) override;
  WorkHandle reduce_scatter(const ReduceScatter& request, const Identity& id) override;
  int64_t all_reduce_scratch_bytes(int64_t elements) const override;
  WorkHandle all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) override;
  WorkHandle exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) override;
  std::unique_ptr<Group> split(const std::vector<std::vector<int>>& groups) override;

 private:
  std::unique_ptr<SymmetricOperation> operation(Operation kind, const Identity& id) const;
  at::Tensor tensor(const void* data, int64_t count, DType dtype) const;
  std::vector<at::Tensor> tensors(const std::vector<const std::byte*>& data, int64_t count, DType dtype) const;

  const std::shared_ptr<SymmetricArena> arena_;
  const at::Device device_;
  std::shared_ptr<SymmetricMembers> shared_;  // null for one member
};

}  // namespace dovetail::comm

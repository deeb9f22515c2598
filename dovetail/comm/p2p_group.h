// A Group over any Link: every collective is made of direct messages, so all transports give the same bits.
//
// all_gather: each member sends its slice to each other one. reduce_scatter: each member sends every other one's
// slice to it and sums what it gets over the tree. all_reduce: the two after one another, by equal slices. Between
// each two members and per operation there travel one header (64 control bytes) each way and the payload; nothing
// waits for a round trip.
#pragma once

#include <chrono>
#include <memory>

#include "dovetail/comm/group.h"
#include "dovetail/comm/link.h"

namespace dovetail::comm {

struct P2PMembers;

class P2PGroup : public Group {
 public:
  explicit P2PGroup(std::shared_ptr<P2PMembers> members);

  int rank() const override;
  std::span<const int> global_ranks() const override;
  std::string transport() const override;
  bool needs_gather_buffer() const override;  // false for one member
  Gathered all_gather(std::span<const GatherPlane> planes, const Identity& id) override;
  int64_t reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const override;
  WorkHandle reduce_scatter(const ReduceScatter& request, const Identity& id) override;
  int64_t all_reduce_scratch_bytes(int64_t elements) const override;
  WorkHandle all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) override;
  WorkHandle exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) override;
  std::vector<std::vector<std::byte>> gather_bytes(std::span<const std::byte> mine, const Identity& id) override;
  void barrier(const Identity& id) override;
  std::unique_ptr<Group> split(const std::vector<std::vector<int>>& groups) override;
  // The caller's part of a split.
  std::shared_ptr<P2PMembers> split_members(const std::vector<std::vector<int>>& groups);
  void fail(std::string_view reason) noexcept override;
  const Counters& counters() const override;
  std::chrono::nanoseconds blocked() const override;
  std::chrono::milliseconds deadline() const override;

 protected:
  const std::shared_ptr<P2PMembers> members_;
};

// The group of all ranks of a link, numbered as there.
std::unique_ptr<Group> make_p2p_world(std::unique_ptr<Link> link, std::chrono::milliseconds deadline);
std::shared_ptr<P2PMembers> make_p2p_members(std::unique_ptr<Link> link, std::chrono::milliseconds deadline);

}  // namespace dovetail::comm

// Reductions that read their operands in the peers' memory. Each member tells the others where its operand lies, sums
// its own slice once all have, and says so: only then may an operand be written again.
#pragma once

#include <memory>
#include <vector>

#include "dovetail/comm/p2p_operation.h"
#include "dovetail/comm/peer/peer_link.h"

namespace dovetail::comm {

// Words beside the headers, from each member to each other one; not counted as payload.
class PeerOperation : public P2POperation {
 public:
  ~PeerOperation() override { settle(); }

 protected:
  // `operand` of so many bytes is read by peers; copied where they cannot address it.
  PeerOperation(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, Operation operation,
                const Identity& id, const std::byte* operand, int64_t bytes);

  // Sends a word to all. The meaning of stages is the operation's; each once.
  void tell(int stage);
  // Waits until all have told it.
  void hear(int stage, Clock::time_point until);
  // After hear(kPosted): where the member's operand lies.
  const std::byte* operand(int member) const { return operands_[member]; }
  std::byte* own_operand() { return own_; }
  const std::shared_ptr<Peers>& peers() const { return peers_; }
  void complete(Clock::time_point until) override;  // the last stages were told and heard; counts

 private:
  uint32_t tag(int stage) const;

  const std::shared_ptr<Peers> peers_;
  std::shared_ptr<std::byte> copy_;  // of an operand in private memory
  std::byte* own_;
  std::vector<const std::byte*> operands_;  // per member
};

class PeerReduceScatter final : public PeerOperation {
 public:
  PeerReduceScatter(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, const ReduceScatter& request,
                    const Identity& id);
  ~PeerReduceScatter() override { settle(); }

 private:
  void second_act(Clock::time_point until) override;
  void complete(Clock::time_point until) override;
  void sum(Interval elements);
  // Runs of elements of the own slice that any member has written.
  std::vector<Interval> written() const;

  const DType dtype_;
  const int64_t begin_;  // bytes, of the own slice in every operand
  const std::span<float> output_;
  const SumOutput how_;
  const bool sparse_, output_is_zero_;
};

class PeerAllReduce final : public PeerOperation {
 public:
  PeerAllReduce(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, std::span<float> data,
                std::span<std::byte> scratch, const Identity& id);
  ~PeerAllReduce() override { settle(); }

 private:
  void second_act(Clock::time_point until) override;
  void complete(Clock::time_point until) override;

  const std::span<float> data_;
  const std::span<std::byte> scratch_;
};

}  // namespace dovetail::comm

// Operations of a group as messages over a Link: headers first, verified before any payload byte is used.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "dovetail/comm/group.h"
#include "dovetail/comm/p2p_world.h"

namespace dovetail::comm {

// An operation that only moves bytes: gather, exchange, barrier. Filled with send() and receive(), then posted once.
class P2POperation : public Work {
 public:
  P2POperation(std::shared_ptr<P2PMembers> members, Operation operation, const Identity& id);
  ~P2POperation() override;

  // Members' messages in either direction match in order. Empty ones do not travel.
  void send(int member, std::span<const std::byte> bytes);
  void receive(int member, std::span<std::byte> bytes);
  // Payload that travels by other means: agreed upon and counted as if it were messages.
  void declare(int member, int64_t sends, int64_t expects);
  // Something else that all members must name alike; a difference is one of sizes.
  void agree(int64_t value);
  const Header& header() const { return mine_; }
  // Sends the headers and starts all messages.
  void post();
  // post(), and known to the world as having a second act.
  void post_staged();
  uint64_t order() const { return order_; }
  void wait() final;
  // The second act, once.
  void advance(Clock::time_point until);

 protected:
  struct Peer {
    int member = 0;
    int64_t sends = 0, expects = 0;             // payload bytes of the verified stage
    uint32_t sent_sizes = 0, expected_sizes = 0;  // hashes
    std::array<std::byte, kHeaderBytes> header_out, header_in;
    TransferHandle header_send, header_receive;
  };

  // Runs in wait(), after advance(); `until` bounds everything in it.
  virtual void complete(Clock::time_point until);
  // What other ranks wait for besides messages that travel by themselves.
  virtual void second_act(Clock::time_point) {}
  // Called with each peer's header once it is known to be of the same operation.
  virtual void accept(Peer& peer, const Header& theirs);

  void wait_headers(Clock::time_point until);
  void wait_receives(Clock::time_point until);
  void wait_sends(Clock::time_point until);
  void post_messages(int stage);
  void count_bytes();
  // For destructors: waits and drops the error, which the world keeps and throws at the next call.
  void settle() noexcept;
  // Throws for an outcome other than done.
  void require(Outcome outcome, int member);
  int global(int member) const { return members_->ranks[member]; }
  P2PWorld& world() { return *members_->world; }

  const std::shared_ptr<P2PMembers> members_;
  Header mine_;
  const uint32_t tag_base_;  // payload_base()

 private:
  struct Part {
    int member;
    const std::byte* out;  // null for a receive
    std::byte* in;
    int64_t bytes;
  };
  struct Message {
    int member;
    TransferHandle transfer;
  };

  Peer& peer_of(int member);
  Header header_for(const Peer& peer) const;
  [[noreturn]] void fail_late(int member);
  void verify(Peer& peer);

  uint64_t order_ = 0;          // of posting, over all groups of the world; 0 before it
  std::vector<Peer> peers_;     // in the order (rank+1, rank+2, ...)
  std::vector<Part> parts_;     // added since the last post
  std::vector<Message> receives_, sends_;
  int64_t sent_ = 0, received_ = 0;
  bool finished_ = false, advanced_ = false;
};

// reduce_scatter: the payload arrives in scratch and is summed in wait().
class P2PReduceScatter final : public P2POperation {
 public:
  P2PReduceScatter(std::shared_ptr<P2PMembers> members, const ReduceScatter& request, const Identity& id);
  ~P2PReduceScatter() override { settle(); }

 private:
  void complete(Clock::time_point until) override;

  std::vector<const std::byte*> inputs_;  // per member
  DType dtype_;
  std::span<float> output_;
  SumOutput how_;
};

// all_reduce: a reduce-scatter by equal slices, then an all-gather of the sums, which needs no header of its own.
class P2PReduction final : public P2POperation {
 public:
  P2PReduction(std::shared_ptr<P2PMembers> members, std::span<float> data, std::span<std::byte> scratch,
               const Identity& id);
  ~P2PReduction() override { settle(); }
  static Interval slice(int64_t elements, int size, int member);

 private:
  void second_act(Clock::time_point until) override;  // sums and starts the second half
  void complete(Clock::time_point until) override;

  std::span<float> data_;
  std::vector<const std::byte*> inputs_;
};

// gather_bytes: lengths are learned from the headers.
class P2PGatherBytes final : public P2POperation {
 public:
  P2PGatherBytes(std::shared_ptr<P2PMembers> members, Operation operation, std::span<const std::byte> mine,
                 const Identity& id);
  ~P2PGatherBytes() override { settle(); }
  std::vector<std::vector<std::byte>> take() { return std::move(all_); }

 private:
  void complete(Clock::time_point until) override;
  void accept(Peer& peer, const Header& theirs) override;

  std::vector<std::vector<std::byte>> all_;
};

// Bytes of one member's slice in scratch, a multiple of a cache line.
int64_t padded_bytes(int64_t bytes);

}  // namespace dovetail::comm

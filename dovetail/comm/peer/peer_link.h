// A Link whose messages between ranks of one host go through memory that both address; all others, and every fault, go
// through the link below it.
//
// Payload of up to kInlineBytes, and payload from private memory, is copied when it is posted and its send is done.
// What lies in an arena is read there by the receiver, with one copy, while it is inside of any wait of this link; its
// send is done then. A rank whose process has ended is seen at once (pidfd), one that is silent at the deadline.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "dovetail/comm/link.h"
#include "dovetail/comm/peer/arena.h"
#include "dovetail/comm/peer/inbox.h"

namespace dovetail::comm {

// The ranks of this host with their memory, by global rank.
class Peers {
 public:
  Peers(int rank, std::vector<std::shared_ptr<Arena>> arenas, std::vector<int> process_files);
  ~Peers();
  Peers(const Peers&) = delete;

  int rank() const { return rank_; }
  bool local(int rank) const { return arenas_[rank] != nullptr; }  // this rank's own too
  const std::vector<int>& others() const { return others_; }       // local ranks but this one
  Arena& mine() const { return *arenas_[rank_]; }
  const std::shared_ptr<Arena>& arena(int rank) const { return arenas_[rank]; }
  Inbox& inbox(int rank) const { return *reinterpret_cast<Inbox*>(arenas_[rank]->base()); }
  bool ended(int rank) const;  // its process; false for a thread of this one

  // Where memory lies, so that another rank finds it.
  struct Address {
    int32_t owner = -1;  // rank; -1: private memory
    int64_t offset = 0;
    bool operator==(const Address&) const = default;
  };
  Address address_of(const void* p) const;
  std::byte* at(const Address& address) const;

 private:
  const int rank_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<int> process_files_;  // pidfd, -1 for none
  std::vector<int> others_;
};

class PeerLink final : public Link {
 public:
  PeerLink(std::unique_ptr<Link> below, std::shared_ptr<Peers> peers, bool spin);

  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  std::string transport() const override;
  TransferHandle post_send(int to, uint32_t tag, std::span<const std::byte> bytes) override;
  TransferHandle post_receive(int from, uint32_t tag, std::span<std::byte> bytes) override;
  void enter(const Header& operation) override { below_->enter(operation); }
  std::string describe(int rank) override { return below_->describe(rank); }
  bool hopeless(int rank) override { return below_->hopeless(rank) || peers_->ended(rank); }
  void watch(bool on) override { below_->watch(on); }
  Fault report(const Fault& seen) noexcept override;
  void leave(Clock::time_point until) noexcept override;

 private:
  class SendTransfer;
  class ReceiveTransfer;

  // A message that its receiver has not taken yet.
  struct InFlight {
    int slot;
    SendTransfer* transfer;               // null when nobody waits for it
    std::shared_ptr<std::byte> bounced;   // payload copied out of private memory
  };
  struct Waiting {
    uint32_t tag;
    std::shared_ptr<std::byte> bounced;
    std::span<const std::byte> bytes;     // in an arena, or small
    SendTransfer* transfer;
    std::vector<std::byte> small;
  };
  struct Peer {
    uint64_t posted = 0, drained = 0;     // messages to and from it
    std::vector<InFlight> in_flight;
    std::deque<Waiting> waiting;          // for a free slot
    std::vector<int> arrived;             // slots of messages that no receive has asked for, oldest first
    std::vector<ReceiveTransfer*> receives;
  };

  bool try_post(int to, Waiting& message);
  void reap(int to);
  void drain(int from);
  void take(int from, int slot, ReceiveTransfer& transfer);
  void progress();
  Outcome wait_for(const bool& done, int peer, Clock::time_point until);

  const std::unique_ptr<Link> below_;
  const std::shared_ptr<Peers> peers_;
  const bool spin_;
  std::vector<Peer> state_;  // by global rank
};

}  // namespace dovetail::comm

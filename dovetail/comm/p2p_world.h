// What all groups of one world share over a Link: the connection, the counters, and whether it has failed.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/comm/counters.h"
#include "dovetail/comm/link.h"
#include "dovetail/comm/tree_sum.h"

namespace dovetail::comm {

class P2POperation;

class P2PWorld {
 public:
  P2PWorld(std::unique_ptr<Link> link, std::chrono::milliseconds deadline);
  // Takes leave of the other ranks (at most the deadline) or, while an exception unwinds, reports that this rank
  // failed.
  ~P2PWorld();
  P2PWorld(const P2PWorld&) = delete;

  Link& link() { return *link_; }
  Counters& counters() { return counters_; }
  const Counters& counters() const { return counters_; }
  std::chrono::milliseconds deadline() const { return deadline_; }
  // Waits, and counts the time.
  Outcome await(Transfer& transfer, Clock::time_point until);
  std::chrono::nanoseconds blocked() const { return blocked_; }

  bool failed() const { return failure_.has_value(); }
  // Throws the CommError that ended this world, if one did.
  void check() const;
  // Ends this world: reports what was seen in `operation` and throws the CommError, which names the fault seen first.
  [[noreturn]] void blame(const Header& operation, const Fault& seen);
  // The same for a fault whose message is complete and whose two sides both see it.
  [[noreturn]] void blame_pair(int peer, const std::string& message);
  void fail(std::string_view reason) noexcept;

  // Operations in which other ranks wait for a second act of this one, in the order of their posting. Whoever waits for
  // anything does these first (P2POperation::advance), so that ranks may wait in different orders.
  std::vector<P2POperation*>& staged() { return staged_; }

  // Keeps connections of another kind open until this rank has taken leave.
  void keep(std::shared_ptr<void> connections) { kept_.push_back(std::move(connections)); }

  // In words for logs; the link's unless one was set.
  std::string transport() const { return transport_.empty() ? link_->transport() : transport_; }
  void set_transport(std::string words) { transport_ = std::move(words); }

  uint64_t next_order() { return ++order_; }

  // Numbers for the groups of a split; all its members pass the largest of theirs.
  uint32_t next_group() const { return next_group_; }
  void use_group(uint32_t number);

 private:
  std::unique_ptr<Link> link_;
  const std::chrono::milliseconds deadline_;
  const int unwinding_;
  Counters counters_;
  std::chrono::nanoseconds blocked_{0};
  std::vector<std::shared_ptr<void>> kept_;
  std::optional<CommError> failure_;
  std::vector<P2POperation*> staged_;
  uint64_t order_ = 0;
  uint32_t next_group_ = 1;
  std::string transport_;
};

// One group's part; operations share it, so that they may outlive the Group.
struct P2PMembers {
  std::shared_ptr<P2PWorld> world;
  std::vector<int> ranks;  // global, per member
  int rank = 0;            // this member
  uint16_t number = 0;
  uint32_t sequence = 0;   // operations so far
  SumTree tree;

  P2PMembers(std::shared_ptr<P2PWorld> world, std::vector<int> ranks, int rank, uint16_t number);
  int size() const { return static_cast<int>(ranks.size()); }
};

}  // namespace dovetail::comm

#include "dovetail/comm/p2p_world.h"

#include <algorithm>
#include <exception>

namespace dovetail::comm {

P2PWorld::P2PWorld(std::unique_ptr<Link> link, std::chrono::milliseconds deadline)
    : link_(std::move(link)), deadline_(deadline), unwinding_(std::uncaught_exceptions()) {
  DT_CHECK(deadline.count() > 0, "a deadline is positive");
}

P2PWorld::~P2PWorld() {
  if (failed() || link_->size() == 1) return;
  if (std::uncaught_exceptions() > unwinding_) {
    fail("was stopped by an exception");
  } else {
    link_->leave(Clock::now() + deadline_);
  }
}

Outcome P2PWorld::await(Transfer& transfer, Clock::time_point until) {
  const auto start = Clock::now();
  const Outcome outcome = transfer.wait(until);
  blocked_ += Clock::now() - start;
  return outcome;
}

void P2PWorld::check() const {
  if (failure_) throw *failure_;
}

void P2PWorld::blame(const Header& operation, const Fault& seen) {
  const Fault first = link_->report(seen);
  const int me = link_->rank();
  std::string message = fmt::format("{} on rank {}: {}", operation.describe(), me, seen.reason);
  int peer = seen.rank;
  if (first.reason != seen.reason) {
    message += fmt::format("; first fault: {}", first.reason);
    if (first.rank != me && first.rank >= 0) peer = first.rank;
  }
  failure_.emplace(peer, message);
  throw *failure_;
}

void P2PWorld::blame_pair(int peer, const std::string& message) {
  link_->report({peer, message});
  failure_.emplace(peer, message);
  throw *failure_;
}

void P2PWorld::fail(std::string_view reason) noexcept {
  if (failed() || link_->size() == 1) return;
  const int me = link_->rank();
  const std::string message = fmt::format("rank {} {}", me, reason);
  link_->report({me, message});
  failure_.emplace(me, message);
}

void P2PWorld::use_group(uint32_t number) {
  if (number > UINT16_MAX) raise<ConfigError>("a world has at most {} groups", UINT16_MAX);
  next_group_ = std::max(next_group_, number + 1);
}

P2PMembers::P2PMembers(std::shared_ptr<P2PWorld> world, std::vector<int> ranks, int rank, uint16_t number)
    : world(std::move(world)), ranks(std::move(ranks)), rank(rank), number(number), tree(this->ranks) {}

}  // namespace dovetail::comm

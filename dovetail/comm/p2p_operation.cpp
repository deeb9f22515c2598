#include "dovetail/comm/p2p_operation.h"

#include <cstring>

namespace dovetail::comm {
namespace {

Header make_header(const P2PMembers& members, Operation operation, const Identity& id) {
  Header h;
  h.operation = operation;
  h.phase = id.phase;
  h.group = members.number;
  h.unit = id.unit;
  h.sequence = members.sequence;
  h.step = id.step;
  h.set_label(id.label);
  return h;
}

// Votes, hashes and barriers: lengths need not agree and count as control bytes.
bool is_control(Operation operation) {
  return operation == Operation::gather_bytes || operation == Operation::split || operation == Operation::barrier;
}

}  // namespace

int64_t padded_bytes(int64_t bytes) { return (bytes + 63) / 64 * 64; }

P2POperation::P2POperation(std::shared_ptr<P2PMembers> members, Operation operation, const Identity& id)
    : members_(std::move(members)), mine_(make_header(*members_, operation, id)), tag_base_(payload_base(mine_)) {
  world().check();
  ++members_->sequence;
  const int size = members_->size();
  peers_.resize(size - 1);
  for (int i = 0; i < size - 1; ++i) peers_[i].member = (members_->rank + 1 + i) % size;
}

P2POperation::~P2POperation() {
  settle();
  std::erase(world().staged(), this);
}

void P2POperation::settle() noexcept {
  try {
    wait();
  } catch (const std::exception&) {
  }
}

P2POperation::Peer& P2POperation::peer_of(int member) {
  const int size = members_->size();
  return peers_[(member - members_->rank - 1 + size) % size];
}

void P2POperation::send(int member, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  const int64_t n = static_cast<int64_t>(bytes.size());
  parts_.push_back({member, bytes.data(), nullptr, n});
  Peer& peer = peer_of(member);
  peer.sends += n;
  peer.sent_sizes = add_size(peer.sent_sizes, n);
}

void P2POperation::receive(int member, std::span<std::byte> bytes) {
  if (bytes.empty()) return;
  const int64_t n = static_cast<int64_t>(bytes.size());
  parts_.push_back({member, nullptr, bytes.data(), n});
  Peer& peer = peer_of(member);
  peer.expects += n;
  peer.expected_sizes = add_size(peer.expected_sizes, n);
}

void P2POperation::declare(int member, int64_t sends, int64_t expects) {
  Peer& peer = peer_of(member);
  peer.sends += sends;
  peer.expects += expects;
  if (sends > 0) peer.sent_sizes = add_size(peer.sent_sizes, sends);
  if (expects > 0) peer.expected_sizes = add_size(peer.expected_sizes, expects);
  sent_ += sends;
  received_ += expects;
}

void P2POperation::agree(int64_t value) {
  for (Peer& peer : peers_) {
    peer.sent_sizes = add_size(peer.sent_sizes, value);
    peer.expected_sizes = add_size(peer.expected_sizes, value);
  }
}

Header P2POperation::header_for(const Peer& peer) const {
  Header h = mine_;
  h.sends = peer.sends;
  h.expects = peer.expects;
  h.messages = peer.sent_sizes;
  return h;
}

void P2POperation::post() {
  Link& link = world().link();
  order_ = world().next_order();
  link.enter(mine_);
  if (!is_control(mine_.operation)) world().counters().add_operation(mine_.phase);
  const uint32_t tag = header_tag(members_->number);
  for (Peer& peer : peers_) {
    peer.header_out = encode(header_for(peer));
    peer.header_receive = link.post_receive(global(peer.member), tag, peer.header_in);
    peer.header_send = link.post_send(global(peer.member), tag, peer.header_out);
  }
  post_messages(0);
}

void P2POperation::post_messages(int stage) {
  Link& link = world().link();
  for (const Part& part : parts_) {
    const uint32_t tag = payload_tag(tag_base_, stage, part.bytes);
    const size_t n = static_cast<size_t>(part.bytes);
    if (part.out) {
      sends_.push_back({part.member, link.post_send(global(part.member), tag, {part.out, n})});
      sent_ += part.bytes;
    } else {
      receives_.push_back({part.member, link.post_receive(global(part.member), tag, {part.in, n})});
      received_ += part.bytes;
    }
  }
  parts_.clear();
}

void P2POperation::wait() {
  if (finished_ || order_ == 0) return;
  finished_ = true;
  try {
    world().check();
    const auto until = Clock::now() + world().deadline();
    for (P2POperation* staged : std::vector(world().staged())) {
      if (staged->order() < order_) staged->advance(until);
    }
    advance(until);
    complete(until);
  } catch (...) {
    peers_.clear();  // gives the memory back
    receives_.clear();
    sends_.clear();
    throw;
  }
}

void P2POperation::post_staged() {
  post();
  world().staged().push_back(this);
}

void P2POperation::advance(Clock::time_point until) {
  if (advanced_) return;
  advanced_ = true;
  second_act(until);
  std::erase(world().staged(), this);
}

void P2POperation::complete(Clock::time_point until) {
  wait_headers(until);
  wait_receives(until);
  wait_sends(until);
  count_bytes();
}

void P2POperation::wait_headers(Clock::time_point until) {
  for (Peer& peer : peers_) {
    const Outcome outcome = world().await(*peer.header_receive, until);
    if (outcome == Outcome::late) fail_late(peer.member);
    require(outcome, peer.member);
    verify(peer);
  }
}

void P2POperation::wait_receives(Clock::time_point until) {
  for (Message& m : receives_) require(world().await(*m.transfer, until), m.member);
  receives_.clear();
}

void P2POperation::wait_sends(Clock::time_point until) {
  for (Peer& peer : peers_) require(world().await(*peer.header_send, until), peer.member);
  for (Message& m : sends_) require(world().await(*m.transfer, until), m.member);
  sends_.clear();
}

void P2POperation::count_bytes() {
  const int64_t headers = static_cast<int64_t>(kHeaderBytes * peers_.size());
  Counters& counters = world().counters();
  if (is_control(mine_.operation)) {
    counters.add_control(headers + sent_, headers + received_);
  } else {
    counters.add_control(headers, headers);
    counters.add_payload(mine_.phase, sent_, received_);
  }
}

void P2POperation::verify(Peer& peer) {
  const Header theirs = decode(peer.header_in);
  const int me = global(members_->rank), them = global(peer.member);
  if (!same_operation(mine_, theirs)) {
    world().blame_pair(them, fmt::format("ranks {} and {} are in different operations: rank {}: {}; rank {}: {}", me,
                                         them, me, mine_.describe(), them, theirs.describe()));
  }
  if (is_control(mine_.operation)) return accept(peer, theirs);
  const bool sizes_agree = theirs.sends == peer.expects && theirs.expects == peer.sends;
  if (!sizes_agree || theirs.messages != peer.expected_sizes) {
    world().blame_pair(
        them, fmt::format("ranks {} and {} disagree about sizes in {}: rank {} sends {} bytes and expects {}; "
                          "rank {} sends {} bytes and expects {}{}",
                          me, them, mine_.describe(), me, peer.sends, peer.expects, them, theirs.sends,
                          theirs.expects, sizes_agree ? ", in messages of other sizes" : ""));
  }
  accept(peer, theirs);
}

void P2POperation::accept(Peer&, const Header&) {}

void P2POperation::require(Outcome outcome, int member) {
  if (outcome == Outcome::done) return;
  const int rank = global(member);
  const std::string state = world().link().describe(rank);
  const std::string known = state.empty() ? "" : fmt::format(" ({})", state);
  if (outcome == Outcome::late) {
    world().blame(mine_, {rank, fmt::format("rank {} has not answered within {} ms{}", rank, world().deadline().count(),
                                            known)});
  }
  world().blame(mine_, {rank, fmt::format("the exchange with rank {} broke off{}", rank, known)});
}

// Some header is missing at the deadline. A header that differs explains it better than silence
// does; otherwise all who are silent are named.
void P2POperation::fail_late(int member) {
  std::string silent;
  int first = -1;
  bool after = false;
  for (Peer& peer : peers_) {
    after = after || peer.member == member;
    if (!after) continue;
    if (peer.member != member && peer.header_receive->wait(Clock::now()) == Outcome::done) {
      verify(peer);
      continue;
    }
    const int rank = global(peer.member);
    const std::string state = world().link().describe(rank);
    silent += fmt::format("{}rank {}{}", silent.empty() ? "" : ", ", rank,
                          state.empty() ? "" : fmt::format(" ({})", state));
    if (first < 0) first = rank;
  }
  world().blame(mine_, {first, fmt::format("no answer within {} ms from {}", world().deadline().count(), silent)});
}

}  // namespace dovetail::comm

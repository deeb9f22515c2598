#include "dovetail/comm/peer/peer_link.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "dovetail/base/error.h"

namespace dovetail::comm {
namespace {

constexpr int kSpins = 2000;              // some 50 microseconds, where every rank has a core of its own
constexpr int64_t kNap = 20'000;          // microseconds between two looks for faults

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Peers::Peers(int rank, std::vector<std::shared_ptr<Arena>> arenas, std::vector<int> process_files)
    : rank_(rank), arenas_(std::move(arenas)), process_files_(std::move(process_files)) {
  for (int r = 0; r < std::ssize(arenas_); ++r)
    if (r != rank_ && local(r)) others_.push_back(r);
}

Peers::~Peers() {
  for (int file : process_files_)
    if (file >= 0) ::close(file);
}

bool Peers::ended(int rank) const {
  if (process_files_[rank] < 0) return false;
  pollfd query{process_files_[rank], POLLIN, 0};
  return ::poll(&query, 1, 0) > 0;
}

Peers::Address Peers::address_of(const void* p) const {
  for (int r = 0; r < std::ssize(arenas_); ++r)
    if (local(r) && arenas_[r]->holds(p)) return {r, static_cast<const std::byte*>(p) - arenas_[r]->base()};
  return {};
}

std::byte* Peers::at(const Address& address) const {
  DT_CHECK(address.owner >= 0 && local(address.owner), "memory of rank {} is not addressable here", address.owner);
  return arenas_[address.owner]->base() + address.offset;
}

class PeerLink::SendTransfer final : public Transfer {
 public:
  SendTransfer(PeerLink& link, int to) : link_(link), to_(to) {}
  ~SendTransfer() override {
    Peer& peer = link_.state_[to_];
    for (InFlight& message : peer.in_flight)
      if (message.transfer == this) message.transfer = nullptr;
    std::erase_if(peer.waiting, [&](const Waiting& message) { return message.transfer == this && !done_; });
  }
  Outcome wait(Clock::time_point until) override { return link_.wait_for(done_, to_, until); }

 private:
  friend class PeerLink;
  PeerLink& link_;
  const int to_;
  bool done_ = false;
};

class PeerLink::ReceiveTransfer final : public Transfer {
 public:
  ReceiveTransfer(PeerLink& link, int from, uint32_t tag, std::span<std::byte> bytes)
      : link_(link), from_(from), tag_(tag), bytes_(bytes) {}
  ~ReceiveTransfer() override {
    if (!done_) std::erase(link_.state_[from_].receives, this);
  }
  Outcome wait(Clock::time_point until) override { return link_.wait_for(done_, from_, until); }

 private:
  friend class PeerLink;
  PeerLink& link_;
  const int from_;
  const uint32_t tag_;
  const std::span<std::byte> bytes_;
  bool done_ = false;
};

PeerLink::PeerLink(std::unique_ptr<Link> below, std::shared_ptr<Peers> peers, bool spin)
    : below_(std::move(below)), peers_(std::move(peers)), spin_(spin), state_(below_->size()) {}

std::string PeerLink::transport() const {
  const size_t on_host = peers_->others().size() + 1;
  if (on_host == state_.size()) return fmt::format("shared memory of {} ranks", on_host);
  return fmt::format("shared memory of {} ranks a host, {} between hosts", on_host, below_->transport());
}

TransferHandle PeerLink::post_send(int to, uint32_t tag, std::span<const std::byte> bytes) {
  if (!peers_->local(to)) return below_->post_send(to, tag, bytes);
  auto transfer = std::make_unique<SendTransfer>(*this, to);
  Waiting message{.tag = tag, .bounced = nullptr, .bytes = bytes, .transfer = transfer.get(), .small = {}};
  const bool small = bytes.size() <= kInlineBytes;
  if (!small && peers_->address_of(bytes.data()).owner < 0) {
    message.bounced = peers_->mine().allocate(static_cast<int64_t>(bytes.size()));
    std::memcpy(message.bounced.get(), bytes.data(), bytes.size());
    message.bytes = {message.bounced.get(), bytes.size()};
  }
  transfer->done_ = small || message.bounced;
  Peer& peer = state_[to];
  reap(to);
  if (peer.waiting.empty() && try_post(to, message)) return transfer;
  if (small) {
    message.small.assign(bytes.begin(), bytes.end());
    message.bytes = message.small;
  }
  if (transfer->done_) message.transfer = nullptr;
  peer.waiting.push_back(std::move(message));
  return transfer;
}

bool PeerLink::try_post(int to, Waiting& message) {
  Peer& peer = state_[to];
  Inbox& inbox = peers_->inbox(to);
  Channel& channel = inbox.from(rank());
  const int at = static_cast<int>(peer.posted % kSlots);
  MessageSlot& slot = channel.slots[at];
  // Free only once reap() has seen it taken: until then in_flight holds its payload.
  if (slot.state.load(std::memory_order_acquire) != SlotState::free) return false;
  slot.tag = message.tag;
  slot.bytes = static_cast<int64_t>(message.bytes.size());
  if (message.bytes.size() <= kInlineBytes) {
    slot.owner = MessageSlot::kInline;
    if (!message.bytes.empty()) std::memcpy(slot.payload, message.bytes.data(), message.bytes.size());
  } else {
    const Peers::Address address = peers_->address_of(message.bytes.data());
    slot.owner = address.owner;
    slot.offset = address.offset;
  }
  SendTransfer* waits = message.transfer && !message.transfer->done_ ? message.transfer : nullptr;
  peer.in_flight.push_back({at, waits, std::move(message.bounced)});
  slot.state.store(SlotState::posted, std::memory_order_relaxed);
  channel.posted.store(++peer.posted, std::memory_order_release);
  inbox.signal();
  return true;
}

void PeerLink::reap(int to) {
  Peer& peer = state_[to];
  Channel& channel = peers_->inbox(to).from(rank());
  std::erase_if(peer.in_flight, [&](InFlight& message) {
    MessageSlot& slot = channel.slots[message.slot];
    if (slot.state.load(std::memory_order_acquire) != SlotState::taken) return false;
    slot.state.store(SlotState::free, std::memory_order_relaxed);
    if (message.transfer) message.transfer->done_ = true;
    return true;
  });
  while (!peer.waiting.empty() && try_post(to, peer.waiting.front())) peer.waiting.pop_front();
}

TransferHandle PeerLink::post_receive(int from, uint32_t tag, std::span<std::byte> bytes) {
  if (!peers_->local(from)) return below_->post_receive(from, tag, bytes);
  auto transfer = std::make_unique<ReceiveTransfer>(*this, from, tag, bytes);
  Peer& peer = state_[from];
  Channel& channel = peers_->inbox(rank()).from(from);
  const auto found =
      std::ranges::find_if(peer.arrived, [&](int slot) { return channel.slots[slot].tag == tag; });
  if (found == peer.arrived.end()) {
    peer.receives.push_back(transfer.get());
    return transfer;
  }
  const int slot = *found;
  peer.arrived.erase(found);
  take(from, slot, *transfer);
  return transfer;
}

void PeerLink::take(int from, int at, ReceiveTransfer& transfer) {
  MessageSlot& slot = peers_->inbox(rank()).from(from).slots[at];
  DT_CHECK_EQ(slot.bytes, static_cast<int64_t>(transfer.bytes_.size()), "bytes of a message under tag {}", slot.tag);
  const std::byte* source =
      slot.owner == MessageSlot::kInline ? slot.payload : peers_->at({slot.owner, slot.offset});
  if (slot.bytes > 0) std::memcpy(transfer.bytes_.data(), source, transfer.bytes_.size());
  transfer.done_ = true;
  // Nobody waits for what travelled in its slot, but for a free slot now and then.
  const bool wake = slot.owner != MessageSlot::kInline || at % (kSlots / 4) == 0;
  slot.state.store(SlotState::taken, std::memory_order_release);
  if (wake) peers_->inbox(from).signal();
}

void PeerLink::drain(int from) {
  Peer& peer = state_[from];
  Channel& channel = peers_->inbox(rank()).from(from);
  for (const uint64_t posted = channel.posted.load(std::memory_order_acquire); peer.drained < posted; ++peer.drained) {
    const int at = static_cast<int>(peer.drained % kSlots);
    const auto found = std::ranges::find(peer.receives, channel.slots[at].tag, &ReceiveTransfer::tag_);
    if (found == peer.receives.end()) {
      peer.arrived.push_back(at);
      continue;
    }
    ReceiveTransfer& transfer = **found;
    peer.receives.erase(found);
    take(from, at, transfer);
  }
}

void PeerLink::progress() {
  for (int r : peers_->others()) {
    reap(r);
    drain(r);
  }
}

Outcome PeerLink::wait_for(const bool& done, int peer, Clock::time_point until) {
  if (done) return Outcome::done;
  Inbox& inbox = peers_->inbox(rank());
  bool watching = false;
  Outcome outcome = Outcome::late;
  for (int spins = 0;;) {
    const uint32_t seen = inbox.events.load();
    progress();
    if (done) {
      outcome = Outcome::done;
      break;
    }
    if (spin_ && spins++ < kSpins) {
      if (spins % 8 == 0) pause_briefly();
      continue;
    }
    const auto left = std::chrono::duration_cast<std::chrono::microseconds>(until - Clock::now()).count();
    if (left <= 0) break;
    inbox.sleep(seen, std::min(left, kNap));
    if (inbox.events.load() != seen) continue;
    // Nothing came for a while.
    if (!watching) below_->watch(watching = true);
    if (!hopeless(peer)) continue;
    progress();
    outcome = done ? Outcome::done : Outcome::broken;
    break;
  }
  if (watching) below_->watch(false);
  return outcome;
}

Fault PeerLink::report(const Fault& seen) noexcept {
  const Fault first = below_->report(seen);
  for (int r : peers_->others()) peers_->inbox(r).signal();
  return first;
}

// What others have not taken yet and lies here must be taken before this rank's memory goes.
void PeerLink::leave(Clock::time_point until) noexcept {
  auto has_left = [&](int r) {
    const Peer& peer = state_[r];
    return peer.waiting.empty() &&
           std::ranges::none_of(peer.in_flight, [](const InFlight& m) { return m.bounced != nullptr; });
  };
  for (int r : peers_->others()) {
    Inbox& inbox = peers_->inbox(rank());
    for (uint32_t seen = inbox.events.load(); Clock::now() < until; seen = inbox.events.load()) {
      progress();
      if (has_left(r) || hopeless(r)) break;
      inbox.sleep(seen, kNap);
    }
  }
  below_->leave(until);
}

}  // namespace dovetail::comm

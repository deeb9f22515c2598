#include <cstring>

#include "dovetail/comm/arguments.h"
#include "dovetail/comm/p2p_operation.h"

namespace dovetail::comm {

P2PReduceScatter::P2PReduceScatter(std::shared_ptr<P2PMembers> members, const ReduceScatter& r, const Identity& id)
    : P2POperation(std::move(members), Operation::reduce_scatter, id),
      inputs_(members_->size()),
      dtype_(r.dtype),
      output_(r.output, static_cast<size_t>(r.slices[members_->rank].size())),
      how_(sum_output(r)) {
  const int size = members_->size(), me = members_->rank;
  const int64_t item = size_of(r.dtype), own = r.slices[me].size() * item;
  inputs_[me] = r.input + r.slices[me].begin * item;
  std::byte* scratch = r.scratch.data();
  for (int i = 1; i < size; ++i) {
    const int from = (me - i + size) % size, to = (me + i) % size;
    receive(from, {scratch, static_cast<size_t>(own)});
    inputs_[from] = scratch;
    scratch += padded_bytes(own);
    send(to, {r.input + r.slices[to].begin * item, static_cast<size_t>(r.slices[to].size() * item)});
  }
}

void P2PReduceScatter::complete(Clock::time_point until) {
  wait_headers(until);
  wait_receives(until);
  members_->tree.sum(inputs_, dtype_, output_, how_);
  wait_sends(until);
  count_bytes();
}

Interval P2PReduction::slice(int64_t elements, int size, int member) {
  const int64_t each = padded_bytes((elements + size - 1) / size * 4) / 4;
  return {std::min(elements, each * member), std::min(elements, each * (member + 1))};
}

P2PReduction::P2PReduction(std::shared_ptr<P2PMembers> members, std::span<float> data, std::span<std::byte> scratch,
                           const Identity& id)
    : P2POperation(std::move(members), Operation::all_reduce, id), data_(data), inputs_(members_->size()) {
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data.size());
  const size_t own = static_cast<size_t>(slice(elements, size, me).size());
  std::byte* slot = scratch.data();
  // The sum replaces the own slice, so it is read from a copy.
  if (own > 0) std::memcpy(slot, data.data() + slice(elements, size, me).begin, own * 4);
  inputs_[me] = slot;
  for (int i = 1; i < size; ++i) {
    const int from = (me - i + size) % size, to = (me + i) % size;
    slot += padded_bytes(static_cast<int64_t>(own) * 4);
    receive(from, {slot, own * 4});
    inputs_[from] = slot;
    const Interval theirs = slice(elements, size, to);
    send(to, std::as_bytes(data.subspan(theirs.begin, theirs.size())));
  }
}

void P2PReduction::second_act(Clock::time_point until) {
  wait_headers(until);
  wait_receives(until);
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data_.size());
  const Interval mine = slice(elements, size, me);
  const auto own = data_.subspan(mine.begin, mine.size());
  members_->tree.sum(inputs_, DType::f32, own);
  // The slices about to be received must have left.
  wait_sends(until);
  for (int i = 1; i < size; ++i) {
    const Interval theirs = slice(elements, size, (me - i + size) % size);
    receive((me - i + size) % size, std::as_writable_bytes(data_.subspan(theirs.begin, theirs.size())));
    send((me + i) % size, std::as_bytes(own));
  }
  post_messages(1);
}

void P2PReduction::complete(Clock::time_point until) {
  wait_receives(until);
  wait_sends(until);
  count_bytes();
}

P2PGatherBytes::P2PGatherBytes(std::shared_ptr<P2PMembers> members, Operation operation,
                               std::span<const std::byte> mine, const Identity& id)
    : P2POperation(std::move(members), operation, id), all_(members_->size()) {
  all_[members_->rank].assign(mine.begin(), mine.end());
  for (int i = 1; i < members_->size(); ++i) send((members_->rank + i) % members_->size(), mine);
}

void P2PGatherBytes::accept(Peer& peer, const Header& theirs) {
  all_[peer.member].resize(static_cast<size_t>(theirs.sends));
  receive(peer.member, all_[peer.member]);
}

void P2PGatherBytes::complete(Clock::time_point until) {
  wait_headers(until);
  post_messages(0);
  wait_receives(until);
  wait_sends(until);
  count_bytes();
}

}  // namespace dovetail::comm

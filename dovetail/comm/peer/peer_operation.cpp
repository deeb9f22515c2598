#include "dovetail/comm/peer/peer_operation.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/math.h"
#include "dovetail/comm/arguments.h"

namespace dovetail::comm {
namespace {

constexpr int kFirstStage = 8;  // tags of words, apart from those of payload
enum Stage { kPosted, kSummed, kTaken };

int64_t all_bytes(const ReduceScatter& r) { return r.slices.back().end * size_of(r.dtype); }

}  // namespace

PeerOperation::PeerOperation(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, Operation operation,
                             const Identity& id, const std::byte* operand, int64_t bytes)
    : P2POperation(std::move(members), operation, id),
      peers_(std::move(peers)),
      own_(const_cast<std::byte*>(operand)),
      operands_(members_->size()) {
  if (bytes > 0 && peers_->address_of(operand).owner < 0) {
    copy_ = peers_->mine().allocate(bytes);
    std::memcpy(copy_.get(), operand, static_cast<size_t>(bytes));
    own_ = copy_.get();
  }
  operands_[members_->rank] = own_;
}

uint32_t PeerOperation::tag(int stage) const {
  return payload_tag(tag_base_, kFirstStage + stage, sizeof(Peers::Address));
}

// A word is small: it is copied when it is posted.
void PeerOperation::tell(int stage) {
  const Peers::Address address = stage == kPosted && own_ ? peers_->address_of(own_) : Peers::Address{};
  for (int m = 0; m < members_->size(); ++m)
    if (m != members_->rank)
      world().link().post_send(global(m), tag(stage), std::as_bytes(std::span(&address, 1)));
}

void PeerOperation::hear(int stage, Clock::time_point until) {
  std::vector<Peers::Address> words(members_->size());
  std::vector<std::pair<int, TransferHandle>> transfers;
  for (int m = 0; m < members_->size(); ++m)
    if (m != members_->rank)
      transfers.emplace_back(m, world().link().post_receive(global(m), tag(stage),
                                                            std::as_writable_bytes(std::span(&words[m], 1))));
  for (const auto& [m, transfer] : transfers) {
    require(world().await(*transfer, until), m);
    if (stage == kPosted) operands_[m] = words[m].owner < 0 ? nullptr : peers_->at(words[m]);
  }
}

void PeerOperation::complete(Clock::time_point until) {
  wait_sends(until);
  count_bytes();
}

PeerReduceScatter::PeerReduceScatter(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers,
                                     const ReduceScatter& r, const Identity& id)
    : PeerOperation(std::move(members), std::move(peers), Operation::reduce_scatter, id, r.input, all_bytes(r)),
      dtype_(r.dtype),
      begin_(r.slices[members_->rank].begin * size_of(r.dtype)),
      output_(r.output, static_cast<size_t>(r.slices[members_->rank].size())),
      how_(sum_output(r)),
      sparse_(r.sparse),
      output_is_zero_(r.output_is_zero) {
  const int64_t own = static_cast<int64_t>(output_.size()) * size_of(dtype_);
  for (int m = 0; m < members_->size(); ++m)
    if (m != members_->rank) declare(m, r.slices[m].size() * size_of(dtype_), own);
  post_staged();
  tell(kPosted);
}

void PeerReduceScatter::second_act(Clock::time_point until) {
  wait_headers(until);
  hear(kPosted, until);
  const auto size = static_cast<int64_t>(output_.size());
  if (size > 0 && !sparse_) sum({0, size});
  if (size > 0 && sparse_) {
    int64_t end = 0;
    const bool clear = !how_.accumulate && !output_is_zero_;
    auto skip_to = [&](int64_t next) {
      if (clear) std::fill(output_.begin() + end, output_.begin() + next, 0.0f);
    };
    for (const Interval& run : written()) {
      skip_to(run.begin);
      sum(run);
      end = run.end;
    }
    skip_to(size);
  }
  tell(kTaken);
}

void PeerReduceScatter::sum(Interval elements) {
  std::vector<const std::byte*> inputs;
  for (int m = 0; m < members_->size(); ++m)
    inputs.push_back(operand(m) + begin_ + elements.begin * size_of(dtype_));
  SumOutput how = how_;
  if (how_.finished)
    how.finished = [&](int64_t begin, std::span<const float> run) { how_.finished(elements.begin + begin, run); };
  members_->tree.sum(inputs, dtype_, output_.subspan(elements.begin, elements.size()), how);
}

std::vector<Interval> PeerReduceScatter::written() const {
  const int64_t item = size_of(dtype_);
  std::vector<Interval> runs, merged;
  for (int m = 0; m < members_->size(); ++m) {
    const Peers::Address address = peers()->address_of(operand(m));
    const int64_t bytes = static_cast<int64_t>(output_.size()) * item;
    for (const Interval& run : peers()->arena(address.owner)->written(address.offset + begin_, bytes))
      runs.push_back({run.begin / item, ceil_div(run.end, item)});
  }
  std::ranges::sort(runs, {}, &Interval::begin);
  for (const Interval& run : runs) {
    if (!merged.empty() && run.begin <= merged.back().end)
      merged.back().end = std::max(merged.back().end, run.end);
    else
      merged.push_back(run);
  }
  return merged;
}

void PeerReduceScatter::complete(Clock::time_point until) {
  hear(kTaken, until);
  PeerOperation::complete(until);
}

PeerAllReduce::PeerAllReduce(std::shared_ptr<P2PMembers> members, std::shared_ptr<Peers> peers, std::span<float> data,
                             std::span<std::byte> scratch, const Identity& id)
    : PeerOperation(std::move(members), std::move(peers), Operation::all_reduce, id,
                    std::as_bytes(data).data(), static_cast<int64_t>(data.size_bytes())),
      data_(data),
      scratch_(scratch) {
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data.size()), own = P2PReduction::slice(elements, size, me).size();
  // Each member's slice to its owner, and every sum to all.
  for (int m = 0; m < size; ++m) {
    if (m == me) continue;
    const int64_t theirs = P2PReduction::slice(elements, size, m).size();
    declare(m, theirs * 4, own * 4);
    declare(m, own * 4, theirs * 4);
  }
  post_staged();
  tell(kPosted);
}

// Nobody but this rank reads its slice of its own operand until it says that the slice is summed.
void PeerAllReduce::second_act(Clock::time_point until) {
  const int size = members_->size(), me = members_->rank;
  const int64_t elements = static_cast<int64_t>(data_.size());
  auto slice = [&](int m) { return P2PReduction::slice(elements, size, m); };
  wait_headers(until);
  hear(kPosted, until);
  if (const Interval mine = slice(me); !mine.empty()) {
    std::vector<const std::byte*> inputs;
    for (int m = 0; m < size; ++m) inputs.push_back(operand(m) + mine.begin * 4);
    const std::span<float> sum(reinterpret_cast<float*>(scratch_.data()), static_cast<size_t>(mine.size()));
    members_->tree.sum(inputs, DType::f32, sum);
    std::memcpy(own_operand() + mine.begin * 4, sum.data(), sum.size_bytes());
  }
  tell(kSummed);
  hear(kSummed, until);
  for (int m = 0; m < size; ++m) {
    const Interval s = slice(m);
    if (m != me && !s.empty()) std::memcpy(own_operand() + s.begin * 4, operand(m) + s.begin * 4, s.size() * 4);
  }
  auto* own = reinterpret_cast<std::byte*>(data_.data());
  if (own_operand() != own && !data_.empty()) std::memcpy(own, own_operand(), data_.size_bytes());
  tell(kTaken);
}

void PeerAllReduce::complete(Clock::time_point until) {
  hear(kTaken, until);
  PeerOperation::complete(until);
}

}  // namespace dovetail::comm

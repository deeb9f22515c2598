#include "dovetail/comm/c10d/symmetric_operation.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace dovetail::comm {
namespace {

constexpr int kOffsetStage = 8;  // tags apart from those of payload

}  // namespace

DeviceOrder::DeviceOrder(at::Device device) : device_(device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
}

c10::Stream DeviceOrder::current() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }

c10::Event DeviceOrder::mark(c10::Stream stream) const {
  c10::Event event(device_.type());
  event.record(stream);
  return event;
}

std::optional<c10::Event> DeviceOrder::run(const std::function<void()>& enqueue) const {
  if (!stream_) {
    enqueue();
    return std::nullopt;
  }
  mark(current()).block(*stream_);
  const c10::StreamGuard guard(*stream_);
  enqueue();
  return mark(*stream_);
}

void DeviceOrder::join(const std::optional<c10::Event>& end) const {
  if (end) end->block(current());
}

// Headers, and beside them a message from each member to each that fetches from it: the offsets of what it published,
// in order. They are not counted, as the words of comm/peer are not.
class SymmetricAgreement final : public P2POperation {
 public:
  SymmetricAgreement(std::shared_ptr<P2PMembers> members, Operation operation, const Identity& id)
      : P2POperation(std::move(members), operation, id), out_(members_->size()), in_(members_->size()) {}
  ~SymmetricAgreement() override { settle(); }

  void publish(int member, int64_t offset, int64_t bytes) {
    declare(member, bytes, 0);
    out_[member].push_back(offset);
  }
  void fetch(int member, int64_t bytes) {
    declare(member, 0, bytes);
    in_[member].push_back(-1);
  }
  int64_t offset(int member, int index) const { return in_[member][index]; }

  void reach() {
    post();
    for (int m = 0; m < members_->size(); ++m)
      if (!out_[m].empty())
        sent_offsets_.emplace_back(
            m, world().link().post_send(global(m), tag(out_[m]), std::as_bytes(std::span(out_[m]))));
    wait();
  }

 private:
  void complete(Clock::time_point until) override {
    wait_headers(until);
    std::vector<std::pair<int, TransferHandle>> received;
    for (int m = 0; m < members_->size(); ++m)
      if (!in_[m].empty())
        received.emplace_back(
            m, world().link().post_receive(global(m), tag(in_[m]), std::as_writable_bytes(std::span(in_[m]))));
    for (const auto& [m, transfer] : received) require(world().await(*transfer, until), m);
    for (const auto& [m, transfer] : sent_offsets_) require(world().await(*transfer, until), m);
    wait_sends(until);
    count_bytes();
  }
  uint32_t tag(const std::vector<int64_t>& offsets) const {
    return payload_tag(tag_base_, kOffsetStage, static_cast<int64_t>(offsets.size() * sizeof(int64_t)));
  }

  std::vector<std::vector<int64_t>> out_, in_;  // offsets, per member
  std::vector<std::pair<int, TransferHandle>> sent_offsets_;
};

SymmetricOperation::SymmetricOperation(std::shared_ptr<SymmetricMembers> shared, Operation operation,
                                       const Identity& id)
    : shared_(std::move(shared)),
      agreement_(std::make_unique<SymmetricAgreement>(shared_->members, operation, id)),
      rounds_(1),
      fetched_(shared_->members->size()) {}

SymmetricOperation::~SymmetricOperation() {
  try {
    wait();
  } catch (const std::exception&) {  // the world keeps it
  }
}

std::byte* SymmetricOperation::lend(const std::byte* data, int64_t bytes) {
  if (bytes == 0 || shared_->arena->holds(data, bytes)) return const_cast<std::byte*>(data);
  lent_.push_back(shared_->arena->allocate_raw(bytes));
  lendings_.push_back({lent_.back().get(), data, bytes});
  return lent_.back().get();
}

void SymmetricOperation::publish(int member, const std::byte* lent, int64_t bytes) {
  if (bytes > 0) agreement_->publish(member, shared_->arena->offset_of(lent), bytes);
}

void SymmetricOperation::fetch(int member, std::byte* to, int64_t bytes) {
  if (bytes == 0) return;
  agreement_->fetch(member, bytes);
  rounds_.back().fetches.push_back({member, to, bytes, fetched_[member]++});
}

void SymmetricOperation::next_round(std::function<void()> then) {
  rounds_.back().then = std::move(then);
  rounds_.emplace_back();
}

void SymmetricOperation::copy(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) copies_.push_back({to, from, bytes});
}

void SymmetricOperation::agree(int64_t value) { agreement_->agree(value); }

void SymmetricOperation::start(std::function<void()> last) {
  agreement_->reach();
  try {
    end_ = shared_->order.run([&] { enqueue(last); });
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    shared_->members->world->blame(agreement_->header(), {-1, fmt::format("the device refused: {}", error.what())});
  }
  started_ = true;
}

// On a device the time starts when a signal's turn comes, since the host runs ahead; it is the whole deadline then.
void SymmetricOperation::enqueue(const std::function<void()>& last) {
  const auto until = Clock::now() + shared_->members->world->deadline();
  for (const Copy& lending : lendings_) move(lending);
  for (size_t r = 0; r < rounds_.size(); ++r) {
    tell(until);
    if (r == 0)
      for (const Copy& own : copies_) move(own);
    hear(r == 0 ? "its operand is complete" : "its part is summed", until);
    for (const Fetch& f : rounds_[r].fetches) {
      const int64_t offset = agreement_->offset(f.member, f.index);
      move({f.to, shared_->arena->at(shared_->members->ranks[f.member], offset, f.bytes), f.bytes});
    }
    if (rounds_[r].then) rounds_[r].then();
  }
  tell(until);
  if (last) last();
  hear("it has fetched all", until);
}

void SymmetricOperation::move(const Copy& c) const { copy_bytes(c.to, c.from, c.bytes, shared_->arena->device()); }

template <class Call>
void SymmetricOperation::signal(const std::string& complaint, Clock::time_point until, Call&& call) const {
  const P2PMembers& members = *shared_->members;
  for (int i = 1; i < members.size(); ++i) {
    const int rank = members.ranks[(members.rank + i) % members.size()];
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    try {
      call(rank, static_cast<size_t>(std::max<int64_t>(left, 1)));
    } catch (const std::exception& error) {
      const std::string text = error.what();
      members.world->blame(agreement_->header(),
                           {rank, fmt::format("rank {} has not {} within {} ms: {}", rank, complaint,
                                              members.world->deadline().count(), text.substr(0, text.find('\n')))});
    }
  }
}

void SymmetricOperation::tell(Clock::time_point until) const {
  signal("taken the last signal", until,
         [&](int rank, size_t ms) { shared_->arena->signals().put_signal(rank, shared_->channel, ms); });
}

void SymmetricOperation::hear(const char* what, Clock::time_point until) const {
  signal(fmt::format("signalled that {}", what), until,
         [&](int rank, size_t ms) { shared_->arena->signals().wait_signal(rank, shared_->channel, ms); });
}

void SymmetricOperation::wait() {
  if (!started_) return;
  started_ = false;
  shared_->order.join(end_);
  lent_.clear();
  shared_->members->world->check();
}

}  // namespace dovetail::comm

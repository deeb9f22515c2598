#include "dovetail/comm/threads/hub.h"

#include "dovetail/base/error.h"
#include "dovetail/comm/threads/mailbox.h"

namespace dovetail::comm {
namespace {

class ThreadLink final : public Link {
 public:
  ThreadLink(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}
  ~ThreadLink() override { hub_->leave(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return hub_->size(); }
  std::string transport() const override { return "threads"; }

  TransferHandle post_send(int to, uint32_t tag, std::span<const std::byte> bytes) override {
    return post(rank_, to, true, tag, const_cast<std::byte*>(bytes.data()), bytes.size());
  }
  TransferHandle post_receive(int from, uint32_t tag, std::span<std::byte> bytes) override {
    return post(from, rank_, false, tag, bytes.data(), bytes.size());
  }

  void enter(const Header& operation) override { hub_->enter(rank_, operation); }
  std::string describe(int rank) override { return hub_->describe(rank); }
  bool hopeless(int rank) override { return hub_->faulty() || hub_->gone(rank); }
  void watch(bool) override {}  // the hub tells at once
  Fault report(const Fault& seen) noexcept override { return hub_->report(rank_, seen); }
  void leave(Clock::time_point) noexcept override {}  // what was sent has been received

 private:
  TransferHandle post(int from, int to, bool send, uint32_t tag, std::byte* bytes, size_t size) {
    auto transfer = std::make_unique<ThreadTransfer>(hub_, from, to, send, tag, bytes, size);
    hub_->mailbox(from, to).post(*transfer);
    return transfer;
  }

  const std::shared_ptr<Hub> hub_;
  const int rank_;
};

}  // namespace

Hub::Hub(int size) : size_(size) {
  DT_CHECK(size > 0, "a world has at least one rank");
  for (int i = 0; i < size * size; ++i) mailboxes_.push_back(std::make_unique<Mailbox>());
  for (int i = 0; i < size; ++i) state_.push_back(std::make_unique<RankState>());
}

Hub::~Hub() = default;

void Hub::enter(int rank, const Header& operation) {
  std::lock_guard lock(mutex_);
  state_[rank]->operation = operation;
}

std::string Hub::describe(int rank) {
  std::lock_guard lock(mutex_);
  return fmt::format("{}, last in {}", gone(rank) ? "gone" : "alive", state_[rank]->operation.describe());
}

Fault Hub::report(int reporter, const Fault& seen) {
  Fault first;
  {
    std::lock_guard lock(mutex_);
    if (!fault_) fault_ = seen;
    first = *fault_;
    faulty_.store(true, std::memory_order_release);
  }
  wake_all();
  return first;
}

void Hub::leave(int rank) {
  state_[rank]->gone.store(true, std::memory_order_release);
  wake_all();
}

void Hub::wake_all() {
  for (auto& mailbox : mailboxes_) mailbox->wake();
}

std::unique_ptr<Link> make_thread_link(std::shared_ptr<Hub> hub, int rank) {
  return std::make_unique<ThreadLink>(std::move(hub), rank);
}

}  // namespace dovetail::comm

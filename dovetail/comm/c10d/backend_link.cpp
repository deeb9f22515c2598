#include "dovetail/comm/c10d/backend_link.h"

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace dovetail::comm {
namespace {

constexpr int kFarewellTag = 1 << 29;  // above all groups' header tags, below payload tags

class BackendTransfer final : public Transfer {
 public:
  BackendTransfer(std::shared_ptr<Heartbeat> heartbeat, c10::intrusive_ptr<::c10d::Work> work, int peer)
      : heartbeat_(std::move(heartbeat)), work_(std::move(work)), peer_(peer) {}

  Outcome wait(Clock::time_point until) override {
    if (outcome_ == Outcome::late && work_) outcome_ = wait_once(until);
    return outcome_;
  }

 private:
  Outcome wait_once(Clock::time_point until) {
    // After a fault what has arrived can still be taken; only a longer wait is pointless.
    const bool hopeful = heartbeat_->begin_wait(work_, peer_);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    const auto limit = hopeful ? std::max(left, std::chrono::milliseconds(1)) : std::chrono::milliseconds(1);
    bool done = false, threw = false;
    try {
      done = work_->wait(limit);
    } catch (const std::exception&) {
      threw = true;
    }
    if (hopeful) heartbeat_->end_wait();
    work_.reset();
    if (done) return Outcome::done;
    return hopeful && threw && Clock::now() >= until ? Outcome::late : Outcome::broken;
  }

  const std::shared_ptr<Heartbeat> heartbeat_;
  c10::intrusive_ptr<::c10d::Work> work_;
  const int peer_;
  Outcome outcome_ = Outcome::late;
};

class Broken final : public Transfer {
 public:
  Outcome wait(Clock::time_point) override { return Outcome::broken; }
};

class BackendLink final : public Link {
 public:
  BackendLink(c10::intrusive_ptr<::c10d::Store> store, std::unique_ptr<Heartbeat> heartbeat,
              c10::intrusive_ptr<::c10d::Backend> backend)
      : store_(std::move(store)), heartbeat_(std::move(heartbeat)), backend_(std::move(backend)) {}

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  std::string transport() const override { return backend_->getBackendName(); }

  TransferHandle post_send(int to, uint32_t tag, std::span<const std::byte> bytes) override {
    return post(const_cast<std::byte*>(bytes.data()), bytes.size(), to, [&](std::vector<at::Tensor>& message) {
      return backend_->send(message, to, static_cast<int>(tag));
    });
  }
  TransferHandle post_receive(int from, uint32_t tag, std::span<std::byte> bytes) override {
    return post(bytes.data(), bytes.size(), from, [&](std::vector<at::Tensor>& message) {
      return backend_->recv(message, from, static_cast<int>(tag));
    });
  }

  void enter(const Header& operation) override { heartbeat_->enter(operation); }
  std::string describe(int rank) override { return heartbeat_->describe(rank); }
  bool hopeless(int rank) override { return heartbeat_->hopeless(rank); }
  void watch(bool on) override { heartbeat_->watch(on); }
  Fault report(const Fault& seen) noexcept override { return heartbeat_->report(seen); }

  // Connections are closed hard, so nobody closes before all have said that they have everything.
  void leave(Clock::time_point until) noexcept override {
    heartbeat_->leaving();
    std::vector<std::byte> bytes(static_cast<size_t>(2 * size()));
    std::vector<TransferHandle> transfers;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      transfers.push_back(post_receive(r, kFarewellTag, std::span(bytes).subspan(2 * r, 1)));
      transfers.push_back(post_send(r, kFarewellTag, std::span(bytes).subspan(2 * r + 1, 1)));
    }
    for (auto& transfer : transfers) {
      if (transfer->wait(until) != Outcome::done) return;
    }
  }

 private:
  template <class F>
  TransferHandle post(std::byte* data, size_t size, int peer, F&& start) {
    try {
      std::vector<at::Tensor> message{
          at::from_blob(data, {static_cast<int64_t>(size)}, at::TensorOptions().dtype(at::kByte))};
      return std::make_unique<BackendTransfer>(heartbeat_, start(message), peer);
    } catch (const std::exception&) {  // the connection is gone already
      return std::make_unique<Broken>();
    }
  }

  const c10::intrusive_ptr<::c10d::Store> store_;
  const std::shared_ptr<Heartbeat> heartbeat_;
  const c10::intrusive_ptr<::c10d::Backend> backend_;
};

}  // namespace

std::unique_ptr<Link> make_backend_link(c10::intrusive_ptr<::c10d::Store> store, std::unique_ptr<Heartbeat> heartbeat,
                                        c10::intrusive_ptr<::c10d::Backend> backend) {
  return std::make_unique<BackendLink>(std::move(store), std::move(heartbeat), std::move(backend));
}

}  // namespace dovetail::comm

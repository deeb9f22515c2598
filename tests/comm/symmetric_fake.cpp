#include "tests/comm/symmetric_fake.h"

#include <barrier>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/peer/arena.h"
#include "dovetail/comm/threads/hub.h"
#include "dovetail/comm/threads/spawn.h"
#include "tests/comm/fake_device.h"

namespace dovetail::comm {
namespace {

namespace sm = ::c10d::symmetric_memory;

using Memory = std::shared_ptr<std::byte>;

// What the ranks have in common.
class Meeting {
 public:
  Meeting(int size, const FakeFaults& faults)
      : size_(size),
        channels_(static_cast<int>(sm::get_signal_pad_size() / (4 * static_cast<size_t>(size)))),
        faults_(faults),
        memory_(static_cast<size_t>(size)),
        pads_(static_cast<size_t>(size) * size * channels_) {}

  int size() const { return size_; }
  const FakeFaults& faults() const { return faults_; }

  // Every rank's memory, once all have come.
  std::vector<Memory> meet(int rank, Memory mine) {
    std::unique_lock lock(mutex_);
    memory_[rank] = std::move(mine);
    ++met_;
    changed_.notify_all();
    TORCH_CHECK(changed_.wait_for(lock, std::chrono::seconds(20), [&] { return met_ == size_; }), "nobody came");
    return memory_;
  }
  void forget(int rank) {
    std::lock_guard lock(mutex_);
    memory_[rank] = nullptr;
  }

  void put(int from, int to, int channel, size_t ms) {
    if (from != faults_.mute) flip(from, to, channel, ms, 0, "put");
  }
  void wait(int from, int to, int channel, size_t ms) { flip(from, to, channel, ms, 1, "wait for"); }

 private:
  void flip(int from, int to, int channel, size_t ms, char expected, const char* what) {
    TORCH_CHECK(channel >= 0 && channel < channels_, "channel ", channel, " of ", channels_);
    std::unique_lock lock(mutex_);
    char& bit = pads_[(static_cast<size_t>(to) * channels_ + channel) * size_ + from];
    const bool in_time =
        changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] { return bit == expected; });
    TORCH_CHECK(in_time, "could not ", what, " the signal from ", from, " to ", to, " on channel ", channel);
    bit = static_cast<char>(1 - expected);
    changed_.notify_all();
  }

  const int size_, channels_;
  const FakeFaults faults_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int met_ = 0;
  std::vector<Memory> memory_;
  std::vector<char> pads_;
};

// Keeps the memory of all ranks alive, as a mapping does.
class FakeMapping final : public sm::SymmetricMemory {
 public:
  FakeMapping(std::shared_ptr<Meeting> meeting, int rank, at::Device device, size_t size, std::vector<Memory> memory)
      : meeting_(std::move(meeting)), rank_(rank), device_(device), size_(size), memory_(std::move(memory)) {}

  std::vector<void*> get_buffer_ptrs() override {
    std::vector<void*> all;
    for (const Memory& m : memory_) all.push_back(m.get());
    return all;
  }
  std::vector<void*> get_signal_pad_ptrs() override { return {}; }
  void** get_buffer_ptrs_dev() override { return nullptr; }
  void** get_signal_pad_ptrs_dev() override { return nullptr; }
  size_t get_buffer_size() override { return size_; }
  size_t get_offset() override { return 0; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  void barrier(int, size_t) override { TORCH_CHECK(false, "of all ranks; not for groups"); }
  void put_signal(int to, int channel, size_t ms) override {
    fake_device::on_current_stream(
        device_, [meeting = meeting_, me = rank_, to, channel, ms] { meeting->put(me, to, channel, ms); });
  }
  void wait_signal(int from, int channel, size_t ms) override {
    fake_device::on_current_stream(
        device_, [meeting = meeting_, me = rank_, from, channel, ms] { meeting->wait(from, me, channel, ms); });
  }
  int get_rank() override { return rank_; }
  int get_world_size() override { return meeting_->size(); }
  c10::Device get_device() override { return device_; }

 private:
  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
  const at::Device device_;
  const size_t size_;
  const std::vector<Memory> memory_;
};

class FakeAllocator final : public sm::SymmetricMemoryAllocator {
 public:
  FakeAllocator(std::shared_ptr<Meeting> meeting, int rank, at::Device device)
      : meeting_(std::move(meeting)), rank_(rank), device_(device) {}

  void* alloc(size_t size, int, const std::optional<std::string>&) override {
    TORCH_CHECK(rank_ != meeting_->faults().no_memory, "out of memory");
    // Full of rubbish, as a device's memory is.
    memory_ = {static_cast<std::byte*>(std::aligned_alloc(4096, size)), [](std::byte* p) { std::free(p); }};
    for (size_t i = 0; i < size; i += 512) memory_.get()[i] = std::byte{0xa5};
    size_ = size;
    return memory_.get();
  }
  void free(void*) override {
    meeting_->forget(rank_);
    memory_ = nullptr;
  }
  size_t get_alloc_size(void*) override { return size_; }
  c10::intrusive_ptr<sm::SymmetricMemory> rendezvous(void*, const std::optional<std::string>& group) override {
    TORCH_CHECK(group == "fakes", "no such group");
    auto all = meeting_->meet(rank_, memory_);
    TORCH_CHECK(rank_ != meeting_->faults().not_mapped, "no access to the peer's memory");
    return c10::make_intrusive<FakeMapping>(meeting_, rank_, device_, size_, std::move(all));
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return device_.type(); }
  std::string name() override { return "fake"; }

 private:
  const std::shared_ptr<Meeting> meeting_;
  const int rank_;
  const at::Device device_;
  Memory memory_;
  size_t size_ = 0;
};

}  // namespace

void spawn_symmetric(int size, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline,
                     const FakeOptions& options) {
  const auto hub = std::make_shared<Hub>(size);
  const auto meeting = std::make_shared<Meeting>(size, options.faults);
  std::vector<std::unique_ptr<Link>> links;
  for (int rank = 0; rank < size; ++rank) links.push_back(make_thread_link(hub, rank));
  const auto make = [&](int rank) {
    const bool indexed = options.device != at::kCPU;
    const at::Device device(options.device, static_cast<at::DeviceIndex>(indexed ? rank : -1));
    const FakeFaults& faults = options.faults;
    return make_symmetric_world(make_p2p_members(std::move(links[rank]), deadline),
                                {.allocator = c10::make_intrusive<FakeAllocator>(meeting, rank, device),
                                 .device = device,
                                 .capacity = options.capacity + (rank == faults.other_size ? 4096 : 0),
                                 .group = "fakes",
                                 .host = host_fingerprint() + (rank == faults.elsewhere ? 1 : 0)});
  };
  spawn_with(size, make, body);
}

}  // namespace dovetail::comm

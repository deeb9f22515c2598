#include "tests/comm/fake_device.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace dovetail::comm::fake_device {
namespace {

class Queue {
 public:
  Queue() : worker_([this](std::stop_token stop) { work(stop); }) {}
  void add(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.empty(); });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void work(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !tasks_.empty(); })) {
      std::function<void()> task = std::move(tasks_.front());
      lock.unlock();
      std::exception_ptr error;
      try {
        task();
      } catch (...) {
        error = std::current_exception();
      }
      task = nullptr;
      lock.lock();
      if (error && !error_) error_ = error;
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::function<void()>> tasks_;
  std::exception_ptr error_;
  std::jthread worker_;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};
using EventHandle = std::shared_ptr<Event>;

// Streams by device and number; 0 is the default one, others come from the pool, a new one each time.
class Streams {
 public:
  static Streams& all() {
    static Streams streams;
    return streams;
  }
  Queue& of(c10::Stream stream) {
    std::lock_guard lock(mutex_);
    auto& queue = queues_[{stream.device_index(), stream.id()}];
    if (!queue) queue = std::make_unique<Queue>();
    return *queue;
  }
  c10::Stream fresh(c10::Device device) {
    std::lock_guard lock(mutex_);
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_);
  }

 private:
  std::mutex mutex_;
  int64_t last_ = 0;
  std::map<std::pair<int, int64_t>, std::unique_ptr<Queue>> queues_;
};

thread_local std::map<int, int64_t> current_streams;  // by device
thread_local c10::DeviceIndex current_device = 0;

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device d) const override {
    const c10::Device before = getDevice();
    setDevice(d);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kPrivateUse1, current_device}; }
  void setDevice(c10::Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current_device = d.index(); }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, d, current_streams[d.index()]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return Streams::all().fresh(d); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const c10::Stream before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }

  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    destroyEvent(*event, s.device_index());
    const auto state = std::make_shared<Event>();
    *event = new EventHandle(state);
    Streams::all().of(s).add([state] {
      std::lock_guard lock(state->mutex);
      state->done = true;
      state->changed.notify_all();
    });
  }
  void block(void* event, const c10::Stream& s) const override {
    Streams::all().of(s).add([state = *static_cast<EventHandle*>(event)] {
      std::unique_lock lock(state->mutex);
      state->changed.wait(lock, [&] { return state->done; });
    });
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventHandle*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Tensor on_host(const at::Tensor& t) {
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, at::TensorOptions().dtype(t.scalar_type()));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  // Devices differ in speed, so that what is not ordered comes in another order.
  const auto slow = std::chrono::microseconds(300) * self.device().index();
  on_current_stream(self.device(), [a = on_host(self), b = on_host(from), slow]() mutable {
    std::this_thread::sleep_for(slow);
    a.copy_(b);
  });
  return self;
}

at::Tensor& zero_(at::Tensor& self) {
  on_current_stream(self.device(), [a = on_host(self)]() mutable { a.zero_(); });
  return self;
}

at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const auto n = C10_AS_INTARRAYREF_SLOW(sizes);
  const auto host = at::empty(n, at::TensorOptions().dtype(*type));
  const at::Device where = device->has_index() ? *device : Guard().getDevice();
  return at::from_blob(host.data_ptr(), n, C10_AS_INTARRAYREF_SLOW(strides), [host](void*) {},
                       at::TensorOptions().dtype(*type).device(where), where);
}

at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned, std::optional<at::MemoryFormat>) {
  const std::vector<c10::SymInt> strides(sizes.size(), 1);  // of one dimension
  return empty_strided(sizes, strides, type, layout, device, pinned);
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar&) {
  on_current_stream(self.device(), [a = on_host(self), b = on_host(other)]() mutable { a.add_(b); });
  return self;
}

at::Tensor add(const at::Tensor& a, const at::Tensor& b, const at::Scalar& alpha) {
  at::Tensor sum = at::empty(a.sizes(), a.options());
  copy_(sum, a, true);
  return add_(sum, b, alpha);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("copy_", copy_);
  m.impl("zero_", zero_);
  m.impl("empty_strided", empty_strided);
  m.impl("empty.memory_format", empty);
  m.impl("add_.Tensor", add_);
  m.impl("add.Tensor", add);
}

}  // namespace

void on_current_stream(c10::Device device, std::function<void()> work) {
  if (device.is_cpu()) return work();
  Streams::all().of(Guard().getStream(device)).add(std::move(work));
}

void synchronize(c10::Device device) { Streams::all().of(Guard().getStream(device)).drain(); }

}  // namespace dovetail::comm::fake_device

#include "dovetail/checkpoint/background.h"

#include "dovetail/base/error.h"

namespace dovetail {

void BackgroundTask::start(Body body) {
  DT_CHECK(!running(), "a background task is still running");
  if (thread_.joinable()) thread_.join();
  cancelled_ = false;
  running_ = true;
  error_ = nullptr;
  thread_ = std::thread([this, body = std::move(body)] {
    std::exception_ptr error;
    try {
      body(cancelled_);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    error_ = error;
    running_ = false;
    ended_.notify_all();
  });
}

bool BackgroundTask::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

bool BackgroundTask::wait_for(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, time, [this] { return !running_; });
}

std::exception_ptr BackgroundTask::error() const {
  const std::lock_guard lock(mutex_);
  DT_CHECK(!running_, "a background task is still running");
  return error_;
}

void BackgroundTask::cancel() {
  cancelled_ = true;
  if (thread_.joinable()) thread_.join();
}

}  // namespace dovetail

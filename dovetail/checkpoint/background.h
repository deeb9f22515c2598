// A piece of work on a thread of its own that can be asked how far it is.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace dovetail {

class BackgroundTask {
 public:
  // The work looks at `cancelled` now and then and returns or throws soon after it is set.
  using Body = std::function<void(const std::atomic<bool>& cancelled)>;

  BackgroundTask() = default;
  ~BackgroundTask() { cancel(); }
  BackgroundTask(const BackgroundTask&) = delete;

  void start(Body body);  // InvariantError while one runs
  bool running() const;
  // Waits at most this long; true when nothing runs.
  bool wait_for(std::chrono::milliseconds time);
  // What the last work threw; null if it ended well. Only when nothing runs.
  std::exception_ptr error() const;
  void ask_to_stop() { cancelled_ = true; }
  void cancel();  // asks and waits

 private:
  std::thread thread_;
  std::atomic<bool> cancelled_{false};
  mutable std::mutex mutex_;
  std::condition_variable ended_;
  bool running_ = false;      // under mutex_
  std::exception_ptr error_;  // under mutex_
};

}  // namespace dovetail

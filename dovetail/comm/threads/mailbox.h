// Messages from one thread rank to another that wait for their other side.
#pragma once

#include <condition_variable>
#include <mutex>
#include <vector>

#include "dovetail/comm/threads/hub.h"

namespace dovetail::comm {

class ThreadTransfer;

class Mailbox {
 public:
  // Pairs the transfer with the oldest opposite one of its tag, or leaves it here until that comes.
  void post(ThreadTransfer& transfer);
  Outcome wait(ThreadTransfer& transfer, Clock::time_point until);
  // Returns when nobody touches the transfer's memory any more.
  void withdraw(ThreadTransfer& transfer);
  void wake();

 private:
  std::vector<ThreadTransfer*>& side(bool send) { return send ? sends_ : receives_; }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<ThreadTransfer*> sends_, receives_;  // waiting, oldest first
};

class ThreadTransfer final : public Transfer {
 public:
  ThreadTransfer(std::shared_ptr<Hub> hub, int from, int to, bool send, uint32_t tag, std::byte* bytes, size_t size);
  ~ThreadTransfer() override { mailbox_.withdraw(*this); }
  Outcome wait(Clock::time_point until) override { return mailbox_.wait(*this, until); }

 private:
  friend class Mailbox;
  enum class State { waiting, copying, done };

  std::shared_ptr<Hub> hub_;
  Mailbox& mailbox_;
  const int peer_;
  const bool send_;
  const uint32_t tag_;
  std::byte* const bytes_;
  const size_t size_;
  State state_ = State::waiting;  // under the mailbox's mutex
};

}  // namespace dovetail::comm

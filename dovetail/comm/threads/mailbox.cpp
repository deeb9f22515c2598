#include "dovetail/comm/threads/mailbox.h"

#include <algorithm>
#include <cstring>

#include "dovetail/base/error.h"

namespace dovetail::comm {

ThreadTransfer::ThreadTransfer(std::shared_ptr<Hub> hub, int from, int to, bool send, uint32_t tag, std::byte* bytes,
                               size_t size)
    : hub_(std::move(hub)),
      mailbox_(hub_->mailbox(from, to)),
      peer_(send ? to : from),
      send_(send),
      tag_(tag),
      bytes_(bytes),
      size_(size) {}

void Mailbox::post(ThreadTransfer& mine) {
  std::unique_lock lock(mutex_);
  auto& others = side(!mine.send_);
  const auto found = std::ranges::find(others, mine.tag_, &ThreadTransfer::tag_);
  if (found == others.end()) {
    side(mine.send_).push_back(&mine);
    return;
  }
  ThreadTransfer& other = **found;
  DT_CHECK_EQ(mine.size_, other.size_, "bytes of a message under tag {}", mine.tag_);
  others.erase(found);
  mine.state_ = other.state_ = ThreadTransfer::State::copying;
  lock.unlock();
  const ThreadTransfer& source = mine.send_ ? mine : other;
  if (source.size_ > 0) std::memcpy(mine.send_ ? other.bytes_ : mine.bytes_, source.bytes_, source.size_);
  lock.lock();
  mine.state_ = other.state_ = ThreadTransfer::State::done;
  changed_.notify_all();
}

Outcome Mailbox::wait(ThreadTransfer& mine, Clock::time_point until) {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (mine.state_ == ThreadTransfer::State::done) return Outcome::done;
    if (mine.state_ == ThreadTransfer::State::copying) {
      changed_.wait(lock);
      continue;
    }
    if (mine.hub_->faulty() || mine.hub_->gone(mine.peer_)) return Outcome::broken;
    if (Clock::now() >= until) return Outcome::late;
    changed_.wait_until(lock, until);
  }
}

void Mailbox::withdraw(ThreadTransfer& mine) {
  std::unique_lock lock(mutex_);
  if (mine.state_ == ThreadTransfer::State::waiting) std::erase(side(mine.send_), &mine);
  changed_.wait(lock, [&] { return mine.state_ != ThreadTransfer::State::copying; });
}

void Mailbox::wake() {
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

}  // namespace dovetail::comm

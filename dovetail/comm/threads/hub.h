// The meeting place of ranks that are threads of one process. A send and its receive meet in a mailbox; whoever comes
// second copies, so nothing is buffered and no third party is needed.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dovetail/comm/link.h"

namespace dovetail::comm {

class Mailbox;

class Hub {
 public:
  explicit Hub(int size);
  ~Hub();

  int size() const { return size_; }
  Mailbox& mailbox(int from, int to) { return *mailboxes_[from * size_ + to]; }

  void enter(int rank, const Header& operation);
  std::string describe(int rank);
  // Keeps the first fault and wakes every waiting rank; returns the first.
  Fault report(int reporter, const Fault& seen);
  // From now on nothing more comes from this rank.
  void leave(int rank);

  bool faulty() const { return faulty_.load(std::memory_order_acquire); }
  bool gone(int rank) const { return state_[rank]->gone.load(std::memory_order_acquire); }

 private:
  struct RankState {
    std::atomic<bool> gone{false};
    Header operation;  // under mutex_
  };
  void wake_all();

  const int size_;
  std::vector<std::unique_ptr<Mailbox>> mailboxes_;
  std::vector<std::unique_ptr<RankState>> state_;
  std::mutex mutex_;
  std::optional<Fault> fault_;  // under mutex_
  std::atomic<bool> faulty_{false};
};

// The link of one rank to the hub.
std::unique_ptr<Link> make_thread_link(std::shared_ptr<Hub> hub, int rank);

}  // namespace dovetail::comm

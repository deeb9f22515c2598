#include "dovetail/comm/peer/inbox.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace dovetail::comm {
namespace {

// Not FUTEX_PRIVATE: processes share the word.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
}

}  // namespace

// Sequentially consistent on both sides: either the sleeper sees the new count or the signal sees the sleeper.
void Inbox::signal() {
  events.fetch_add(1);
  if (sleeping.load() != 0) futex(events, FUTEX_WAKE, INT_MAX, nullptr);
}

void Inbox::sleep(uint32_t seen, int64_t microseconds) {
  timespec limit{microseconds / 1'000'000, microseconds % 1'000'000 * 1000};
  sleeping.store(1);
  if (events.load() == seen) futex(events, FUTEX_WAIT, seen, &limit);
  sleeping.store(0);
}

}  // namespace dovetail::comm

// An operation over symmetric memory. First, on the host, the members agree by headers and tell one another where their
// operands lie; then everything is enqueued on a stream of the group's own: signals say that all operands are
// complete, copies fetch the peers' bytes, signals say that they were taken.
//
// Copies between devices are plain copies of bytes, which CUDA gives to copy engines. Compute units are used by sums,
// by torch's signals (one block that waits) and by copies within a device: of a gather's own slice where it is not in
// place, of operands that lie outside of the arena.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "dovetail/comm/c10d/symmetric_arena.h"
#include "dovetail/comm/p2p_operation.h"

namespace dovetail::comm {

// The order of a device's work. Without streams (CPU) everything has happened when a call returns.
class DeviceOrder {
 public:
  explicit DeviceOrder(at::Device device);
  // Runs `enqueue` on the own stream, after all that was enqueued on the caller's; returns an event of its end.
  std::optional<c10::Event> run(const std::function<void()>& enqueue) const;
  // What the caller enqueues from here on comes after the event.
  void join(const std::optional<c10::Event>& end) const;

 private:
  c10::Event mark(c10::Stream stream) const;
  c10::Stream current() const;

  const at::Device device_;
  std::optional<c10::Stream> stream_;  // none where the device has no streams
};

// What the operations of one group share.
struct SymmetricMembers {
  std::shared_ptr<P2PMembers> members;
  std::shared_ptr<SymmetricArena> arena;
  DeviceOrder order;
  int channel;  // of its signals, no other group's between the same ranks
};

class SymmetricAgreement;

// Filled with publish(), fetch(), copy() and the functions, then started once.
class SymmetricOperation final : public Work {
 public:
  SymmetricOperation(std::shared_ptr<SymmetricMembers> shared, Operation operation, const Identity& id);
  ~SymmetricOperation() override;

  // Where the operand lies in the arena: itself, or a place that it is copied to first. StateError without room.
  std::byte* lend(const std::byte* data, int64_t bytes);
  // The member fetches these bytes of the arena. What members publish for and fetch from one another matches in order.
  void publish(int member, const std::byte* lent, int64_t bytes);
  void fetch(int member, std::byte* to, int64_t bytes);
  // Fetches named from here on wait until all members have completed the round so far and run `then`, on the stream.
  void next_round(std::function<void()> then);
  // Beside the rest, on the stream: a copy within the device, from memory that is complete when the operation starts.
  void copy(std::byte* to, const std::byte* from, int64_t bytes);
  // Something else that all members must name alike.
  void agree(int64_t value);

  // Returns once all members have come and everything is enqueued; `last` runs on the stream once all was fetched.
  void start(std::function<void()> last = {});
  // What the caller enqueues on its current stream from here on sees the results.
  void wait() override;

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    int64_t bytes;
  };
  struct Fetch {
    int member;
    std::byte* to;
    int64_t bytes;
    int index;  // among those from this member
  };
  struct Round {
    std::vector<Fetch> fetches;
    std::function<void()> then;
  };

  void enqueue(const std::function<void()>& last);
  void move(const Copy& copy) const;
  // Tells all members, and waits until all have told.
  void tell(Clock::time_point until) const;
  void hear(const char* what, Clock::time_point until) const;
  template <class Call>
  void signal(const std::string& complaint, Clock::time_point until, Call&& call) const;

  const std::shared_ptr<SymmetricMembers> shared_;
  std::unique_ptr<SymmetricAgreement> agreement_;
  std::vector<std::shared_ptr<std::byte>> lent_;
  std::vector<Copy> lendings_, copies_;
  std::vector<Round> rounds_;
  std::vector<int> fetched_;  // per member
  std::optional<c10::Event> end_;
  bool started_ = false;
};

}  // namespace dovetail::comm

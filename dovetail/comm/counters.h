// Bytes that a rank has sent and received, by phase. Payload is what the plan predicts; control is headers, votes and
// barriers. Bytes that a rank moves to itself and operations of a group of one member are not counted. Operations are
// counted when they start, bytes when their wait() returns.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "dovetail/comm/identity.h"

namespace dovetail::comm {

struct PhaseCount {
  int64_t sent = 0;
  int64_t received = 0;
  int64_t operations = 0;
  bool operator==(const PhaseCount&) const = default;
};

// A snapshot; subtract two to count what lies between.
struct Counts {
  std::array<PhaseCount, kPhases> payload{};
  int64_t control_sent = 0;
  int64_t control_received = 0;

  const PhaseCount& of(Phase phase) const { return payload[static_cast<int>(phase)]; }
  int64_t sent() const;      // payload of all phases
  int64_t received() const;  // payload of all phases
  Counts operator-(const Counts& earlier) const;
};

// Safe to add to from a transport's own threads.
class Counters {
 public:
  void add_operation(Phase phase);
  void add_payload(Phase phase, int64_t sent, int64_t received);
  void add_control(int64_t sent, int64_t received);
  Counts read() const;

 private:
  struct Atomic {
    std::atomic<int64_t> sent{0}, received{0}, operations{0};
  };
  std::array<Atomic, kPhases> payload_;
  std::atomic<int64_t> control_sent_{0}, control_received_{0};
};

}  // namespace dovetail::comm

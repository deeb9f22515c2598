#include "dovetail/comm/counters.h"

namespace dovetail::comm {

int64_t Counts::sent() const {
  int64_t n = 0;
  for (const PhaseCount& p : payload) n += p.sent;
  return n;
}

int64_t Counts::received() const {
  int64_t n = 0;
  for (const PhaseCount& p : payload) n += p.received;
  return n;
}

Counts Counts::operator-(const Counts& earlier) const {
  Counts d = *this;
  for (int i = 0; i < kPhases; ++i) {
    d.payload[i].sent -= earlier.payload[i].sent;
    d.payload[i].received -= earlier.payload[i].received;
    d.payload[i].operations -= earlier.payload[i].operations;
  }
  d.control_sent -= earlier.control_sent;
  d.control_received -= earlier.control_received;
  return d;
}

void Counters::add_operation(Phase phase) { payload_[static_cast<int>(phase)].operations += 1; }

void Counters::add_payload(Phase phase, int64_t sent, int64_t received) {
  payload_[static_cast<int>(phase)].sent += sent;
  payload_[static_cast<int>(phase)].received += received;
}

void Counters::add_control(int64_t sent, int64_t received) {
  control_sent_ += sent;
  control_received_ += received;
}

Counts Counters::read() const {
  Counts c;
  for (int i = 0; i < kPhases; ++i) c.payload[i] = {payload_[i].sent, payload_[i].received, payload_[i].operations};
  c.control_sent = control_sent_;
  c.control_received = control_received_;
  return c;
}

}  // namespace dovetail::comm

// Who is gone. Each rank writes a beat and its latest operation into the store at an interval; while it waits for
// another rank it also reads the others' beats and the first fault that any rank has reported.
//
// Keys: beat/RANK = "COUNT STATE operation in words" with STATE alive, left or failed; fault = "RANK reason", written
// once by whoever sees a fault first, so that survivors that close their connections because of it are not blamed.
//
// One background thread makes all calls to the store; no other thread ever waits for the store without a bound, so a
// store that is gone or stopped (rank 0's) hangs nobody.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "dovetail/comm/link.h"

namespace dovetail::comm {

class Heartbeat {
 public:
  struct Options {
    int rank = 0;
    int size = 1;
    std::chrono::milliseconds deadline{60'000};
    int store_rank = -1;  // the rank whose process holds the store, -1 when none of ours does
  };

  // Starts to beat. The store is this object's own (Store::clone).
  Heartbeat(c10::intrusive_ptr<::c10d::Store> store, const Options& options);
  // Says that this rank has left or failed, and stops. After a fault the rank that holds the store stays until the
  // others have read it. Bounded: a few seconds at most, whatever the store does.
  ~Heartbeat();
  Heartbeat(const Heartbeat&) = delete;

  // A beat every deadline / 8, at least 0.2 s and at most 2 s apart. A rank that is silent for
  // three is taken for dead.
  static std::chrono::milliseconds interval(std::chrono::milliseconds deadline);
  static std::string beat_key(int rank) { return "beat/" + std::to_string(rank); }

  void enter(const Header& operation);
  std::string describe(int rank);
  // Reads the others' beats at every interval while on, as during begin_wait() .. end_wait().
  void watch(bool on);
  // A fault without a rank waits for up to four intervals for one to fall silent.
  Fault report(const Fault& seen) noexcept;
  void leaving();

  // Around a blocking wait for `peer`: the wait is aborted once a fault is known or the peer has left. False when a
  // fault is known already.
  bool begin_wait(const c10::intrusive_ptr<::c10d::Work>& work, int peer);
  void end_wait();
  // A fault is known, or the rank has left; of the last sample.
  bool hopeless(int rank);

 private:
  class Pulse;
  std::shared_ptr<Pulse> pulse_;  // shared with the thread, which may outlive this object when the store hangs
};

}  // namespace dovetail::comm

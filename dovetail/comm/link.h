// What a transport has to offer: messages between two ranks under a tag, and word of who is gone. Groups are built on
// this alone (p2p_group.h), so every transport gives the same bits and the same errors.
//
// Messages from one rank to another under one tag match in the order in which they are posted on each side, and both
// sides name the same number of bytes. Nothing is buffered: a send is done when its bytes have left or been received.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "dovetail/comm/message.h"

namespace dovetail::comm {

using Clock = std::chrono::steady_clock;

enum class Outcome {
  done,
  late,    // the time given is over
  broken,  // the message can no longer arrive: the peer or the connection is gone, or a fault was reported
};

// A message under way. Destroying it gives its memory back, whether or not it has moved.
class Transfer {
 public:
  virtual ~Transfer() = default;
  // Blocks until the outcome is known, at most until then. Bytes move without it, or while either side is in any wait
  // of its link. After `late` or `broken` the link
  // may be unusable; other transfers can still be asked whether they were done before.
  virtual Outcome wait(Clock::time_point until) = 0;
};
using TransferHandle = std::unique_ptr<Transfer>;

// A rank that is to blame and why, in words.
struct Fault {
  int rank = -1;
  std::string reason;
};

// The connections of one rank to all others. Used by one thread at a time.
class Link {
 public:
  virtual ~Link() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string transport() const = 0;  // in words for logs

  // tag < 2^31; to, from != rank(); bytes stay alive until the transfer is done or destroyed. Zero bytes are allowed.
  virtual TransferHandle post_send(int to, uint32_t tag, std::span<const std::byte> bytes) = 0;
  virtual TransferHandle post_receive(int from, uint32_t tag, std::span<std::byte> bytes) = 0;

  // Says which operation this rank is in, for others' error messages.
  virtual void enter(const Header& operation) = 0;
  // What is known of another rank, in words: "alive, in ...", "gone", "" for nothing.
  virtual std::string describe(int rank) = 0;

  // True when waiting for the rank is in vain: a fault is known, or it has left and nothing of it is on the way. What a
  // transport learns at intervals it may only know while watch() is on.
  virtual bool hopeless(int rank) = 0;

  // While on, this rank waits for others in a way that the link does not see, and looks out for
  // those that fall silent.
  virtual void watch(bool on) = 0;

  // Reports a fault that this rank has seen, its own or another's; all waits of all ranks end soon. Returns the fault
  // that was reported first anywhere, so that those who stop because of it are not blamed. Bounded in time, never
  // throws.
  virtual Fault report(const Fault& seen) noexcept = 0;

  // Called once by a rank that has nothing more to send or receive, before destruction and only
  // without a fault. Waits until the others have received what was sent to them, at most until
  // then.
  virtual void leave(Clock::time_point until) noexcept = 0;
};

}  // namespace dovetail::comm

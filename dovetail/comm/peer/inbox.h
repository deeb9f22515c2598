// What lies at the start of every arena: the messages that other ranks of the host post to its rank, and the word on
// which it sleeps. Zero bytes are a valid empty inbox, so nothing is set up.
//
// A channel is a ring with one writer, the sender. The reader takes slots in order but may be done with their payload
// in any order, so each slot says itself when it is free again.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace dovetail::comm {

inline constexpr int kSlots = 128;        // messages of one pair that are not taken yet; more wait at their sender
inline constexpr int kInlineBytes = 480;  // payload that travels in its slot: headers, votes, the message of a step

enum class SlotState : uint32_t { free, posted, taken };

struct alignas(64) MessageSlot {
  std::atomic<SlotState> state;
  uint32_t tag;
  int64_t bytes;
  int32_t owner;    // rank in whose arena the payload lies, kInline: here
  int64_t offset;
  std::byte payload[kInlineBytes];

  static constexpr int32_t kInline = -1;
};
static_assert(std::atomic<SlotState>::is_always_lock_free && sizeof(MessageSlot) == 512);

struct alignas(64) Channel {
  std::atomic<uint64_t> posted;  // messages so far
  MessageSlot slots[kSlots];
};

struct alignas(64) Inbox {
  // Counts whatever its rank may be waiting for; a futex.
  std::atomic<uint32_t> events;
  std::atomic<uint32_t> sleeping;

  // Of messages from a rank; they follow this header.
  Channel& from(int rank) { return reinterpret_cast<Channel*>(this + 1)[rank]; }
  static int64_t bytes(int ranks) { return static_cast<int64_t>(sizeof(Inbox) + ranks * sizeof(Channel)); }

  // Called by any rank: something happened here.
  void signal();
  // Called by its rank: until something has happened since `seen` was read from events, at most so many microseconds.
  void sleep(uint32_t seen, int64_t microseconds);
};

}  // namespace dovetail::comm

// A set of ranks that communicate: the one interface between the engine and every transport.
//
// Members are numbered 0..size()-1 in the order in which they were named to split() (shard order, see design section
// 1), which need not be rank order. Sums over members always follow one fixed binary tree over their *global* rank
// numbers, ((0+1)+(2+3)), so that hierarchical and flat reductions give the same bits when the world is a power of
// two; for other sizes the tree splits at the largest power of two below the size.
//
// All members issue the same calls in the same order. Every call carries an Identity; members that disagree about it,
// or about sizes, get a CommError that names both sides before any byte is used. A member that is dead or silent for
// longer than the deadline becomes a CommError on every other one, with its global rank and the operation. After a
// CommError the group can only be destroyed.
//
// Calls return at once; the memory named in a request belongs to the operation until wait() returns. Bytes move
// without the caller (in shared memory: while their receiver is in any wait), sums are taken in wait(). Handles may be
// waited for in any order, before their Group goes. One thread at a time uses a Group and all that were split from the
// same world. Destroying a world while an exception unwinds is a fail() to the other members; a world that is well
// takes leave of them, for at most the deadline.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/base/dtype.h"
#include "dovetail/base/interval.h"
#include "dovetail/comm/counters.h"
#include "dovetail/comm/identity.h"

namespace dovetail::comm {

// An operation under way. wait() returns when its results may be read and its memory reused; it throws CommError.
// Destroying an unfinished handle waits too, and drops the error.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;
};
using WorkHandle = std::unique_ptr<Work>;  // never null

// One plane of a gather. Slices (bytes of the whole, ascending, disjoint, one per member, possibly
// empty) say what each member holds.
struct GatherPlane {
  // this member's slice: slices[rank].size() bytes; may lie in place inside `whole`
  const std::byte* shard = nullptr;
  std::byte* whole = nullptr;        // slices.back().end bytes; may be null when needs_gather_buffer() is false
  std::vector<Interval> slices;
};

struct Gathered {
  WorkHandle work;
  std::vector<const std::byte*> whole;  // per plane: where the whole plane can be read once work is done
};

// output[i] (+)= scale * sum over members of their input[slices[rank].begin + i], taken in fp32.
struct ReduceScatter {
  const std::byte* input = nullptr;  // slices.back().end elements of `dtype` (fp32 or bf16)
  DType dtype = DType::f32;
  std::vector<Interval> slices;      // elements, one per member
  float* output = nullptr;           // slices[rank].size() elements; may not overlap input
  bool accumulate = false;           // add to output instead of replacing it
  std::span<std::byte> scratch;      // reduce_scratch_bytes() bytes
  // Hints. Much of the input was zeroed by SharedMemory::zero() and not written since: what no member wrote is not
  // read.
  bool sparse = false;
  bool output_is_zero = false;       // and so is the output: it is not written there either
  float scale = 1;
  // Shown, at the latest in wait(), runs of the output that are final, while they are in cache; ascending, each element
  // once but for zeros that `sparse` leaves out. Only where the output is memory of the host.
  std::function<void(int64_t begin, std::span<const float> run)> finished = nullptr;
};

// One point-to-point message. A member may send to itself.
struct Send { int to; std::span<const std::byte> bytes; };
struct Receive { int from; std::span<std::byte> bytes; };

// Memory that the ranks of one host address in place; a device's where the group works on one.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  // Zero-filled bytes of this rank, aligned to pages; peers read them where an operation names them. Null for no bytes.
  // Throws StateError when there is no room.
  virtual std::shared_ptr<std::byte> allocate(int64_t bytes) = 0;
  // Zeroes; pages wholly inside go back to the system until they are written again.
  virtual void zero(std::byte* data, int64_t bytes) noexcept = 0;
};

class Group {
 public:
  virtual ~Group() = default;

  virtual int rank() const = 0;  // this member's number
  int size() const { return static_cast<int>(global_ranks().size()); }
  virtual std::span<const int> global_ranks() const = 0;  // per member

  // What carries the bytes, in words for logs.
  virtual std::string transport() const = 0;

  // Runs of so many consecutive global ranks, the hosts, address one another's memory as one run; 1 where none does.
  virtual int host_ranks() const { return 1; }
  // Memory to take operands from that peers read in place, null where there is none. Lives as long as its pieces.
  virtual SharedMemory* shared_memory() const { return nullptr; }
  // One run of zero-filled bytes that every member addresses, for as long as any of them keeps it. Collective; only
  // where all members share memory.
  virtual std::shared_ptr<std::byte> allocate_together(int64_t bytes, const Identity& id);

  // False where the whole is addressable without a buffer: one member, or members that share memory. Those give shards
  // that lie at their slices' places in one run of allocate_together(); a gather then moves no byte and is over once
  // all members have come to it.
  virtual bool needs_gather_buffer() const = 0;
  // Sent: own slice to each of the other members; steps: 1. All planes travel as one operation.
  virtual Gathered all_gather(std::span<const GatherPlane> planes, const Identity& id) = 0;

  virtual int64_t reduce_scratch_bytes(DType dtype, std::span<const Interval> slices) const = 0;
  // Sent: every other member's slice; steps: 1, plus the sum.
  virtual WorkHandle reduce_scatter(const ReduceScatter& request, const Identity& id) = 0;

  // In place sum of fp32 over members, the same bits on all. Sent: 2*(size-1)/size of the data.
  // scratch: all_reduce_scratch_bytes(data.size()) bytes.
  virtual int64_t all_reduce_scratch_bytes(int64_t elements) const = 0;
  virtual WorkHandle all_reduce(std::span<float> data, std::span<std::byte> scratch, const Identity& id) = 0;

  // Point-to-point moves run at once. Every member calls it, with empty lists where it has no part; messages between
  // two members match in the order of their lists.
  virtual WorkHandle exchange(std::span<const Send> sends, std::span<const Receive> receives, const Identity& id) = 0;

  // Returns every member's bytes in member order; lengths may differ. Small control messages (votes, hashes): counted
  // as control bytes. Blocks.
  virtual std::vector<std::vector<std::byte>> gather_bytes(std::span<const std::byte> mine, const Identity& id) = 0;

  virtual void barrier(const Identity& id) = 0;

  // A group of the named members of this one (numbers here), numbered there in the order given. Called by all members
  // of this group with the lists of all new groups (disjoint; each member in exactly one); returns the caller's.
  virtual std::unique_ptr<Group> split(const std::vector<std::vector<int>>& groups) = 0;

  // Tells every rank of the world that this one goes no further and why: their waits end with a
  // CommError that names it and the reason. Afterwards the group can only be destroyed. Never
  // throws, never blocks.
  virtual void fail(std::string_view reason) noexcept = 0;

  // Time that this rank has spent waiting for others in wait() and in what blocks, of all groups of one world. A
  // backend's own collectives (gloo_native, nccl) are not in it.
  virtual std::chrono::nanoseconds blocked() const = 0;

  virtual const Counters& counters() const = 0;  // shared by all groups split from one world

  virtual std::chrono::milliseconds deadline() const = 0;
};

}  // namespace dovetail::comm

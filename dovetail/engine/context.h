// What all parts of one rank's engine share.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "dovetail/comm/group.h"
#include "dovetail/engine/trace.h"
#include "dovetail/plan/degrees.h"
#include "dovetail/plan/plan.h"
#include "dovetail/storage/ledger.h"
#include "dovetail/storage/memory.h"
#include "dovetail/storage/pool.h"

namespace dovetail::engine_detail {

// The process groups of the rank grid, each in shard order (plan::RankGroup).
struct RankGroups {
  std::shared_ptr<comm::Group> world;
  std::unique_ptr<comm::Group> gather, reduce, refresh, reduce_main, replica, main;
};

RankGroups make_rank_groups(std::shared_ptr<comm::Group> world, const plan::Degrees& degrees);

// Memory that peers address, from a transport that has it.
class PeerAllocator : public Allocator {
 public:
  explicit PeerAllocator(comm::SharedMemory& memory) : memory_(memory) {}
  Memory allocate(int64_t bytes, Role role) override;
  void zero(std::byte* data, int64_t bytes) noexcept override { memory_.zero(data, bytes); }

 private:
  comm::SharedMemory& memory_;
};

struct Context {
  plan::Plan plan;
  plan::GridPosition position;
  RankGroups ranks;
  HostAllocator allocator;
  HostAllocator sparse_allocator{/*huge_pages=*/false};  // gradients of few rows
  std::unique_ptr<PeerAllocator> peer_allocator;  // null where the transport shares no memory
  Ledger ledger;
  std::unique_ptr<SlotPool> pool;          // of gathers and gradients
  std::unique_ptr<SlotPool> scratch_pool;  // of reductions
  int64_t steps = 0;  // optimizer steps done
  std::shared_ptr<Trace> trace;  // while one is recorded
  float gradient_factor = 1;     // of sums over ranks
  bool cast_inputs = true;
  bool completes_gradients = false;  // at the end of each backward pass that reduces
  std::function<void()> backward_began, backward_ended;

  const plan::Degrees& degrees() const { return plan.options.degrees; }
  // For what other ranks read: operands of reductions, fragments.
  Allocator& shared_allocator() { return peer_allocator ? static_cast<Allocator&>(*peer_allocator) : allocator; }
  int64_t rank() const { return plan::rank_at(degrees(), position); }
  // Of a group: its name, "root" for the root group.
  std::string_view label_of(int64_t group) const;
  comm::Identity identity(comm::Phase phase, int64_t group) const;
};

}  // namespace dovetail::engine_detail

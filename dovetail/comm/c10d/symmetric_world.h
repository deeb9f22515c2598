// The ranks of a host come together in symmetric memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dovetail/comm/c10d/symmetric_arena.h"
#include "dovetail/comm/group.h"
#include "dovetail/comm/p2p_world.h"

namespace dovetail::comm {

struct SymmetricOptions {
  SymmetricArena::Allocator allocator;
  at::Device device = at::kCPU;  // of this rank, with its index
  int64_t capacity = 0;          // bytes of each rank's arena, the same on all
  std::string group;             // the name by which the allocator knows the ranks
  uint64_t host;                 // equal on ranks that can map one another's memory: host_fingerprint()
};

// The world of the members, all ranks of their link. Collective. Throws on every rank: ConfigError where the ranks are
// on several hosts or name different capacities, CommError with the rank whose memory could not be made or mapped.
std::unique_ptr<Group> make_symmetric_world(std::shared_ptr<P2PMembers> members, const SymmetricOptions& options);

// Throws ConfigError where torch has no allocator of symmetric memory for CUDA.
void require_symmetric_memory();

// Makes the ranks known to torch by name, as its allocators want them, until the result is destroyed. A name serves
// once in a process: ConfigError.
std::shared_ptr<void> name_ranks(const std::string& name, int rank, int size,
                                 const c10::intrusive_ptr<::c10d::Store>& store);

}  // namespace dovetail::comm

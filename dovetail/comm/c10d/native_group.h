// A Group that lets a c10d backend do the collectives (NCCL on CUDA memory; Gloo's own for comparison).
//
// A backend's collectives hang or worse when ranks disagree, so the headers go first, over a second group of direct
// messages on CPU, and are verified before the backend is called: a call of this group waits until all members have
// come. Even slices without gaps use _allgather_base and alltoall_base, others send and receive. Sums are taken here,
// over the tree, from an all-to-all, because backends leave their order open; so bits equal those of every other
// Group. Small control messages never touch the backend.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "dovetail/comm/group.h"
#include "dovetail/comm/p2p_world.h"

namespace dovetail::comm {

struct NativeOptions {
  // Makes the backend of a group: name is the same on its members and unique in the world.
  std::function<c10::intrusive_ptr<::c10d::Backend>(const std::string& name, int rank, int size)> connect;
  at::Device device = at::kCPU;  // where the memory of all requests lies
};

// members: the same ranks over a Link, for headers and control messages.
std::unique_ptr<Group> make_native_group(std::shared_ptr<P2PMembers> members, NativeOptions options,
                                         const std::string& name);

// SumTree::sum by tensor operations on any device, with the same bits. Shows no runs.
void sum_tensors(const SumTree& tree, const std::vector<at::Tensor>& inputs, at::Tensor out, const SumOutput& how);

}  // namespace dovetail::comm

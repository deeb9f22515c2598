// NCCL where torch was built with it.
#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dovetail::comm {

// Throws ConfigError where torch or this build has no NCCL.
void require_nccl();

// The same, and throws what NCCL throws.
c10::intrusive_ptr<::c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size, std::chrono::milliseconds timeout);

}  // namespace dovetail::comm

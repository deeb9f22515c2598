// Symmetric memory for ranks that are threads: torch's interface over host memory, with signals that behave as those on
// CUDA do. A signal is one bit a sender and channel: it is put once the last one was waited for, or not in time.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "dovetail/comm/c10d/symmetric_world.h"

namespace dovetail::comm {

struct FakeFaults {
  int mute = -1;         // a rank whose signals are lost from the first on
  int no_memory = -1;    // a rank that cannot allocate
  int not_mapped = -1;   // a rank whose rendezvous fails
  int elsewhere = -1;    // a rank on another host
  int other_size = -1;   // a rank whose arena is larger
};

struct FakeOptions {
  int64_t capacity = int64_t{24} << 20;
  at::DeviceType device = at::kCPU;  // or PrivateUse1, see fake_device.h; ranks are its indices
  FakeFaults faults{};
};

// Runs body(world) on threads as spawn() does, over symmetric memory.
void spawn_symmetric(int size, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline,
                     const FakeOptions& options = {});

}  // namespace dovetail::comm

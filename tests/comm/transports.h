// The transports that the conformance suite runs on: one body, every transport and world size.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "dovetail/base/philox.h"
#include "dovetail/comm/c10d/world.h"
#include "dovetail/comm/group.h"
#include "dovetail/comm/threads/spawn.h"
#include "tests/comm/symmetric_fake.h"

namespace dovetail::comm {

struct World {
  // "threads", "peer", "hosts" (peer, two ranks a host), "symmetric" (symmetric_fake.h, on CPU), or "gloo",
  // "gloo_native": threads over one HashStore
  std::string transport;
  int size = 1;
};

inline void run(const World& world, const std::function<void(Group&)>& body,
                std::chrono::milliseconds deadline = kSpawnDeadline) {
  if (world.transport == "threads") return spawn(world.size, body, deadline);
  if (world.transport == "peer") return spawn_peers(world.size, body, deadline);
  if (world.transport == "hosts") return spawn_peers(world.size, body, deadline, 2);
  if (world.transport == "symmetric") return spawn_symmetric(world.size, body, deadline);
  WorldOptions options;
  options.size = world.size;
  options.store = c10::make_intrusive<::c10d::HashStore>();
  options.backend = parse_world_backend(world.transport);
  options.deadline = deadline;
  const auto make = [&](int rank) {
    WorldOptions mine = options;
    mine.rank = rank;
    return make_world(mine);
  };
  spawn_with(world.size, make, body);
}

inline std::vector<World> all_worlds() {
  std::vector<World> worlds;
  for (const char* transport : {"threads", "peer", "gloo", "gloo_native", "symmetric"}) {
    for (int size : {1, 2, 3, 4, 8}) worlds.push_back({transport, size});
  }
  for (int size : {3, 4, 8}) worlds.push_back({"hosts", size});
  return worlds;
}

inline std::string name_of_world(const testing::TestParamInfo<World>& info) {
  return info.param.transport + "_" + std::to_string(info.param.size);
}

inline void PrintTo(const World& w, std::ostream* out) { *out << w.transport << " " << w.size; }

// Reproducible values: element i of stream `stream`.
inline float value_at(uint32_t stream, int64_t i) {
  const auto words = philox({static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), stream, 7}, {1, 2});
  return static_cast<float>(static_cast<int32_t>(words[0])) * 0x1p-24f * (1 + (words[1] & 1023));
}

inline std::byte byte_at(uint32_t stream, int64_t i) {
  return static_cast<std::byte>((static_cast<uint64_t>(i) * 2654435761u + stream * 40503u) >> 7);
}

inline std::vector<Interval> slices_of(const std::vector<int64_t>& sizes) {
  std::vector<Interval> slices;
  int64_t at = 0;
  for (int64_t n : sizes) {
    slices.push_back({at, at + n});
    at += n;
  }
  return slices;
}

inline std::vector<Interval> even_slices(int size, int64_t each) {
  return slices_of(std::vector<int64_t>(static_cast<size_t>(size), each));
}

}  // namespace dovetail::comm

// Ranks as threads of this process: the usual way to test anything that communicates.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "dovetail/comm/group.h"

namespace dovetail::comm {

inline constexpr std::chrono::milliseconds kSpawnDeadline{20'000};

// Runs body(world) on `size` threads, one per rank, and returns when all have ended. A body that throws ends the
// waits of the others; the first error that is not a CommError is thrown here, or else the first CommError.
void spawn(int size, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline = kSpawnDeadline);

// The same where the threads address one another's memory as the ranks of a host do (comm/peer), in one mapping.
// `ranks_per_host` as in PeerOptions.
void spawn_peers(int size, const std::function<void(Group&)>& body,
                 std::chrono::milliseconds deadline = kSpawnDeadline, int ranks_per_host = 0);

// The same over other connections: make(rank) is called on the rank's own thread; no body starts before all are made.
using MakeGroup = std::function<std::unique_ptr<Group>(int rank)>;
void spawn_with(int size, const MakeGroup& make, const std::function<void(Group&)>& body);

}  // namespace dovetail::comm

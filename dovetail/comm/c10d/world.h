// The group of all ranks of a job, over torch's c10d. Nothing is read from the environment: launchers' variables are
// read by the trainer and passed here.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dovetail/comm/group.h"
#include "dovetail/comm/peer/peer_group.h"

namespace dovetail::comm {

enum class WorldBackend {
  gloo,         // our own collectives over Gloo's messages, on CPU
  gloo_native,  // Gloo's own collectives, for comparison
  nccl,         // NCCL's own collectives, on CUDA memory; headers, votes and barriers over Gloo
  symmetric,    // copies between the GPUs of one host, in torch's symmetric memory; the rest over Gloo (peer.md)
};
// "gloo", "gloo_native", "nccl", "symmetric"; throws ConfigError for another name.
WorldBackend parse_world_backend(std::string_view name);

struct WorldOptions {
  int rank = 0;
  int size = 1;

  // Where the ranks meet: a store that exists, or the address of one.
  c10::intrusive_ptr<::c10d::Store> store;
  std::string address = "127.0.0.1";
  uint16_t port = 29500;
  bool holds_store = false;  // this rank serves the store at `port` (rank 0 unless a launcher does)
  int listen_fd = -1;        // a listening socket to serve it from instead, taken over: no race for the port
  std::string name = "world";  // worlds that share a store have different names

  WorldBackend backend = WorldBackend::gloo;
  // Ranks of one host address one another's memory and Gloo carries what goes between hosts. Only with backend gloo.
  std::optional<PeerOptions> peers{};
  std::string interface{};  // network interface of the data connections
  // Or the address to bind them to. Both empty: loopback where `address` is, else what this
  // machine's name resolves to.
  std::string hostname{};

  int device = 0;           // the CUDA device of backend nccl or symmetric
  int64_t arena = 0;        // bytes of each rank's symmetric memory, all of them used at once; backend symmetric only

  std::chrono::milliseconds deadline{300'000};  // of every wait
  std::chrono::milliseconds connect{60'000};    // for all ranks to come together
};

// Blocks until all ranks have joined. Throws CommError that names the ranks that have not within `connect`,
// ConfigError for impossible options.
std::unique_ptr<Group> make_world(const WorldOptions& options);

}  // namespace dovetail::comm

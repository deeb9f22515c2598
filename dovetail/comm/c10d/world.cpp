#include "dovetail/comm/c10d/world.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/comm/c10d/backend_link.h"
#include "dovetail/comm/c10d/gloo_backend.h"
#include "dovetail/comm/c10d/heartbeat.h"
#include "dovetail/comm/c10d/native_group.h"
#include "dovetail/comm/c10d/nccl_backend.h"
#include "dovetail/comm/c10d/symmetric_world.h"
#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/p2p_world.h"

namespace dovetail::comm {
namespace {

using Store = c10::intrusive_ptr<::c10d::Store>;

// Of torch's errors: what follows is a stack.
std::string first_line(const std::exception& error) {
  const std::string_view what = error.what();
  return std::string(what.substr(0, what.find('\n')));
}

bool is_local(const std::string& address) {
  return address.empty() || address == "localhost" || address == "::1" || address.starts_with("127.");
}

void check(const WorldOptions& o) {
  if (o.size < 1) raise<ConfigError>("world size {}, wanted at least 1", o.size);
  if (o.rank < 0 || o.rank >= o.size)
    raise<ConfigError>("rank {} in a world of {}, wanted 0 to {}", o.rank, o.size, o.size - 1);
  if (o.deadline.count() <= 0) raise<ConfigError>("deadline of {} ms, wanted a positive one", o.deadline.count());
  if (o.peers && o.backend != WorldBackend::gloo)
    raise<ConfigError>("shared memory of ranks: wanted backend gloo, got another");
  if (const int host = o.peers ? o.peers->ranks_per_host : 0; host < 0 || (host > 0 && o.size % host != 0))
    raise<ConfigError>("ranks_per_host: wanted 0 or a divisor of the {} ranks, got {}", o.size, host);
  if ((o.backend == WorldBackend::symmetric) != (o.arena > 0))
    raise<ConfigError>("arena of {} bytes: wanted a positive size with backend symmetric, 0 with others", o.arena);
  if (o.connect.count() <= 0) raise<ConfigError>("connect time of {} ms, wanted a positive one", o.connect.count());
}

Store open_store(const WorldOptions& o) {
  if (o.store) return o.store;
  ::c10d::TCPStoreOptions tcp;
  tcp.port = o.port;
  tcp.isServer = o.holds_store;
  tcp.waitWorkers = false;
  tcp.timeout = o.connect;
  if (o.listen_fd >= 0) tcp.masterListenFd = o.listen_fd;
  try {
    return c10::make_intrusive<::c10d::TCPStore>(o.address, tcp);
  } catch (const std::exception& error) {
    throw CommError(-1, fmt::format("rank {} of {} found no store at {}:{} within {} ms: {}", o.rank, o.size, o.address,
                                    o.port, o.connect.count(), first_line(error)));
  }
}

constexpr std::pair<std::string_view, WorldBackend> kBackends[] = {{"gloo", WorldBackend::gloo},
                                                                   {"gloo_native", WorldBackend::gloo_native},
                                                                   {"nccl", WorldBackend::nccl},
                                                                   {"symmetric", WorldBackend::symmetric}};

std::string_view name_of(WorldBackend backend) {
  return std::ranges::find(kBackends, backend, &std::pair<std::string_view, WorldBackend>::second)->first;
}

// What decides which messages follow: ranks that differ in it would wait for one another.
std::string manner_of(const WorldOptions& o) {
  std::string text = fmt::format("a world of {} over {}", o.size, name_of(o.backend));
  if (!o.peers) return text;
  text += " and shared memory";
  if (o.peers->ranks_per_host > 0) text += fmt::format(" of {} ranks each", o.peers->ranks_per_host);
  return text;
}

std::string manner_key(int rank) { return fmt::format("manner/{}", rank); }

// Waits for the first beat of every rank.
void meet(const Store& store, const WorldOptions& o) {
  std::string missing;
  int first = -1;
  const auto start = Clock::now(), until = start + o.connect;
  const auto ms = [](Clock::duration d) { return std::chrono::duration_cast<std::chrono::milliseconds>(d); };
  for (int r = 0; r < o.size; ++r) {
    if (r == o.rank) continue;
    try {
      store->wait({Heartbeat::beat_key(r)}, std::max(ms(until - Clock::now()), std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      // A wait ends a little before its time is up, too.
      if (missing.empty() && Clock::now() + std::chrono::milliseconds(50) < until) {
        const std::string holder = o.store ? "" : ", which rank 0 holds,";
        const auto waited = ms(Clock::now() - start).count();
        throw CommError(o.store ? -1 : 0,
                        fmt::format("rank {} lost the store{} after {} ms, waiting for rank {} of a world of {}",
                                    o.rank, holder, waited, r, o.size));
      }
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
      if (first < 0) first = r;
    }
  }
  if (!missing.empty()) {
    throw CommError(first, fmt::format("rank {} waited {} ms for a world of {}; missing: rank {}", o.rank,
                                       o.connect.count(), o.size, missing));
  }
}

// All ranks are there. Throws ConfigError on each of them where some were started to meet otherwise.
void compare_manners(const Store& store, const WorldOptions& o) {
  std::vector<std::string> keys;
  for (int r = 0; r < o.size; ++r) keys.push_back(manner_key(r));
  std::vector<std::string> manners;
  if (store->hasExtendedApi()) {
    for (const auto& value : store->multiGet(keys)) manners.emplace_back(value.begin(), value.end());
  } else {
    for (const std::string& key : keys) manners.push_back(store->get_to_str(key));
  }
  for (int r = 1; r < o.size; ++r)
    if (manners[r] != manners[0])
      raise<ConfigError>("communication: rank {} was started for {}, rank 0 for {}: wanted the same of all", r,
                         manners[r], manners[0]);
}

Store prefixed(const std::string& name, const Store& store) {
  return c10::make_intrusive<::c10d::PrefixStore>(name, store);
}

GlooOptions gloo_options(const WorldOptions& o) {
  GlooOptions gloo{o.hostname, o.interface, o.connect};
  if (gloo.hostname.empty() && gloo.interface.empty() && (o.store || is_local(o.address))) gloo.hostname = "127.0.0.1";
  return gloo;
}

c10::intrusive_ptr<::c10d::Backend> connect(const Store& store, const WorldOptions& o) {
  try {
    return make_gloo_backend(store, o.rank, o.size, gloo_options(o));
  } catch (const std::exception& error) {
    const std::string via = o.interface.empty() ? "" : fmt::format(" by network interface \"{}\"", o.interface);
    throw CommError(-1, fmt::format("rank {} of {} could not connect to the other ranks{}: {}", o.rank, o.size, via,
                                    first_line(error)));
  }
}

}  // namespace

WorldBackend parse_world_backend(std::string_view name) {
  for (const auto& [known, backend] : kBackends)
    if (name == known) return backend;
  raise<ConfigError>("communication backend \"{}\", wanted gloo, gloo_native, nccl or symmetric", name);
}

std::unique_ptr<Group> make_world(const WorldOptions& o) {
  check(o);
  if (o.backend == WorldBackend::nccl) require_nccl();
  if (o.backend == WorldBackend::symmetric) require_symmetric_memory();
  const Store outer = open_store(o);
  const Store store = prefixed(o.name, outer);
  const int store_rank = o.store ? -1 : 0;
  const std::string manner = manner_of(o);
  store->set(manner_key(o.rank), manner);  // before the first beat
  auto heartbeat =
      std::make_unique<Heartbeat>(store->clone(), Heartbeat::Options{o.rank, o.size, o.deadline, store_rank});
  meet(store, o);
  compare_manners(store, o);
  auto link = make_backend_link(outer, std::move(heartbeat), connect(prefixed("gloo", store), o));
  if (o.peers) return make_peer_world(std::move(link), *o.peers, o.deadline);
  auto members = make_p2p_members(std::move(link), o.deadline);
  if (o.backend == WorldBackend::gloo) return std::make_unique<P2PGroup>(std::move(members));
  if (o.backend == WorldBackend::symmetric) {
    SymmetricOptions symmetric{.allocator = ::c10d::symmetric_memory::get_allocator(at::kCUDA),
                               .device = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(o.device)),
                               .capacity = o.arena,
                               .group = "dovetail/" + o.name,
                               .host = host_fingerprint()};
    members->world->keep(name_ranks(symmetric.group, o.rank, o.size, prefixed("symmetric", store)));
    return make_symmetric_world(std::move(members), symmetric);
  }
  NativeOptions native;
  native.device =
      o.backend == WorldBackend::nccl ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(o.device)) : at::kCPU;
  native.connect = [store, gloo = gloo_options(o), o](const std::string& name, int rank, int size) {
    const Store own = prefixed(name, store);
    return o.backend == WorldBackend::nccl ? make_nccl_backend(own, rank, size, o.deadline)
                                           : make_gloo_backend(own, rank, size, gloo);
  };
  return make_native_group(std::move(members), std::move(native), "native");
}

}  // namespace dovetail::comm

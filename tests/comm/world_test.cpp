#include "dovetail/comm/c10d/world.h"

#include <gmock/gmock.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "dovetail/base/error.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

TEST(World, ImpossibleOptionsAreRefusedByName) {
  WorldOptions o;
  o.size = 2;
  o.rank = 2;
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<ConfigError>(HasSubstr("rank 2 in a world of 2")));
  o.rank = 0;
  o.deadline = 0ms;
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<ConfigError>(HasSubstr("deadline of 0 ms")));
  EXPECT_THAT([] { parse_world_backend("mpi"); }, testing::ThrowsMessage<ConfigError>(HasSubstr("\"mpi\"")));
}

TEST(World, SharedMemoryIsRefusedWhereEveryRankIsAloneOnItsHost) {
  EXPECT_THROW(spawn_peers(2, [](Group&) {}, kSpawnDeadline, /*ranks_per_host=*/1), ConfigError);
}

TEST(World, APeerThatClosesEndsNoProcessBySignal) {
  std::signal(SIGPIPE, SIG_DFL);
  make_world({.size = 1, .store = c10::make_intrusive<::c10d::HashStore>()});
  struct sigaction now {};
  ASSERT_EQ(sigaction(SIGPIPE, nullptr, &now), 0);
  EXPECT_NE(now.sa_handler, SIG_DFL);
}

TEST(World, NcclIsRefusedWhereTorchHasNone) {
#ifndef USE_C10D_NCCL
  WorldOptions o{.size = 1, .store = c10::make_intrusive<::c10d::HashStore>(), .backend = parse_world_backend("nccl")};
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<ConfigError>(HasSubstr("backend nccl")));
#else
  GTEST_SKIP() << "torch has NCCL";
#endif
}

TEST(World, ARankThatDoesNotComeIsNamed) {
  WorldOptions o;
  o.size = 3;
  o.store = c10::make_intrusive<::c10d::HashStore>();
  o.connect = 300ms;
  std::jthread other([o]() mutable {
    o.rank = 1;
    EXPECT_THROW(make_world(o), CommError);
  });
  EXPECT_THAT([&] { make_world(o); },
              testing::ThrowsMessage<CommError>(AllOf(HasSubstr("world of 3"), HasSubstr("missing: rank 2"))));
}

TEST(World, RanksStartedForOtherBackendsAreNamed) {
  const auto started_for = [](auto change, const std::string& wanted) {
    WorldOptions o;
    o.size = 3;
    o.store = c10::make_intrusive<::c10d::HashStore>();
    o.peers.emplace();
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.emplace_back([o, rank, &change, &wanted]() mutable {
        o.rank = rank;
        if (rank == 2) change(o);
        EXPECT_THAT([&] { make_world(o); },
                    testing::ThrowsMessage<ConfigError>(AllOf(
                        HasSubstr("rank 2 was started for a world of 3 over " + wanted),
                        HasSubstr("rank 0 for a world of 3 over gloo and shared memory"))));
      });
  };
  started_for([](WorldOptions& o) { o.peers.reset(); }, "gloo");
  started_for([](WorldOptions& o) { o.peers.reset(), o.backend = WorldBackend::gloo_native; }, "gloo_native");
  started_for([](WorldOptions& o) { o.peers->ranks_per_host = 3; }, "gloo and shared memory of 3 ranks each");
}

// The store of a rank that is gone.
TEST(World, ALostStoreIsNotALongWait) {
  auto server = c10::make_intrusive<::c10d::TCPStore>("127.0.0.1", ::c10d::TCPStoreOptions{
      .port = 0, .isServer = true, .waitWorkers = false});
  WorldOptions o;
  o.rank = 1;
  o.size = 3;
  o.port = server->getPort();
  o.connect = 30s;
  std::jthread gone([&] {
    std::this_thread::sleep_for(500ms);
    server.reset();
  });
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT([&] { make_world(o); },
              testing::ThrowsMessage<CommError>(AllOf(HasSubstr("rank 1 lost the store, which rank 0 holds"),
                                                      HasSubstr("waiting for rank 0"))));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
}

TEST(World, AnAddressWithoutAStoreIsNamed) {
  WorldOptions o;
  o.size = 2;
  o.rank = 1;
  o.port = 1;  // nobody listens there
  o.connect = 300ms;
  EXPECT_THAT([&] { make_world(o); }, testing::ThrowsMessage<CommError>(HasSubstr("127.0.0.1:1")));
}

TEST(World, SeveralWorldsShareAStoreUnderNames) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  const auto make = [&](int rank) {
    WorldOptions o{.rank = rank, .size = 2, .store = store, .name = "first"};
    return make_world(o);
  };
  spawn_with(2, make, [&](Group& first) {
    WorldOptions o{.rank = 1 - first.rank(), .size = 2, .store = store, .name = "second"};
    const auto second = make_world(o);
    first.barrier({});
    second->barrier({});
    EXPECT_EQ(second->rank(), 1 - first.rank());
  });
}

// A body that ends in an exception while its group lives: the others hear of it without fail().
TEST(World, UnwindingTellsTheOthers) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  std::string text;
  std::jthread other([&] {
    const auto world = make_world({.rank = 1, .size = 2, .store = store, .deadline = 30s});
    try {
      world->barrier({});
    } catch (const CommError& error) {
      text = error.what();
    }
  });
  try {
    const auto world = make_world({.rank = 0, .size = 2, .store = store, .deadline = 30s});
    throw std::runtime_error("out of luck");
  } catch (const std::runtime_error&) {
  }
  other.join();
  EXPECT_THAT(text, HasSubstr("rank 0 was stopped by an exception"));
}

}  // namespace
}  // namespace dovetail::comm

#include "dovetail/comm/threads/spawn.h"

#include <barrier>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "dovetail/base/error.h"
#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/peer/peer_group.h"
#include "dovetail/comm/threads/hub.h"

namespace dovetail::comm {
namespace {

constexpr int64_t kThreadCapacity = int64_t{8} << 30;  // address space, as little as a sanitizer bears

// A rank counts as present from the start, so its link exists before any thread runs.
std::vector<std::unique_ptr<Link>> thread_links(int size) {
  const auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Link>> links;
  for (int rank = 0; rank < size; ++rank) links.push_back(make_thread_link(hub, rank));
  return links;
}

// The error to throw once all ranks have ended.
class FirstError {
 public:
  void keep(std::exception_ptr error, bool of_communication) {
    std::lock_guard lock(mutex_);
    if (!error_ || (of_communication_ && !of_communication)) {
      error_ = error;
      of_communication_ = of_communication;
    }
  }
  void rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
  bool of_communication_ = false;
};

void run_rank(const std::function<std::unique_ptr<Group>()>& make, const std::function<void(Group&)>& body,
              FirstError& first) {
  std::unique_ptr<Group> group;
  try {
    group = make();
    body(*group);
  } catch (const CommError&) {
    first.keep(std::current_exception(), true);
    if (group) group->fail("stopped");
  } catch (const std::exception& error) {
    first.keep(std::current_exception(), false);
    if (group) group->fail(std::string("failed: ") + error.what());
  } catch (...) {
    first.keep(std::current_exception(), false);
    if (group) group->fail("failed");
  }
}

}  // namespace

void spawn_with(int size, const MakeGroup& make, const std::function<void(Group&)>& body) {
  FirstError first;
  // No body starts before every rank has its world, or a fault of a quick one would end the making of a slow one's.
  std::barrier made(size);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      const auto with_all = [&, rank] {
        try {
          auto world = make(rank);
          made.arrive_and_wait();
          return world;
        } catch (...) {
          made.arrive_and_drop();
          throw;
        }
      };
      threads.emplace_back([&, with_all] { run_rank(with_all, body, first); });
    }
  }
  first.rethrow();
}

void spawn(int size, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline) {
  auto links = thread_links(size);
  spawn_with(
      size, [&](int rank) { return make_p2p_world(std::move(links[rank]), deadline); }, body);
}

void spawn_peers(int size, const std::function<void(Group&)>& body, std::chrono::milliseconds deadline,
                 int ranks_per_host) {
  auto links = thread_links(size);
  const PeerOptions options{.ranks_per_host = ranks_per_host, .capacity = kThreadCapacity};
  spawn_with(
      size, [&](int rank) { return make_peer_world(std::move(links[rank]), options, deadline); }, body);
}

}  // namespace dovetail::comm

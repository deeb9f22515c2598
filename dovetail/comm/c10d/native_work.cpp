#include "dovetail/comm/c10d/native_work.h"

#include <algorithm>
#include <thread>

namespace dovetail::comm {

NativeWork::NativeWork(std::shared_ptr<P2PMembers> members, const Header& header, BackendWorks works,
                       std::function<void()> then)
    : members_(std::move(members)), header_(header), works_(std::move(works)), then_(std::move(then)) {}

NativeWork::~NativeWork() {
  try {
    wait();
  } catch (const std::exception&) {  // the world keeps it
  }
}

void NativeWork::wait() {
  if (finished_) return;
  finished_ = true;
  P2PWorld& world = *members_->world;
  world.link().watch(true);
  std::string failure;
  try {
    wait_for_works();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  world.link().watch(false);
  works_.clear();
  world.check();
  if (!failure.empty()) {
    const std::string text = failure.substr(0, failure.find('\n'));
    world.blame(header_, {-1, fmt::format("the backend's collective failed: {}", text)});
  }
  if (then_) then_();
}

// Throws the first failure, once no work touches its memory any more or the deadline has passed again.
void NativeWork::wait_for_works() {
  std::exception_ptr failure;
  const auto until = Clock::now() + members_->world->deadline();
  for (auto& work : works_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    try {
      work->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (!failure) return;
  const auto end = Clock::now() + members_->world->deadline();
  const auto running = [](const auto& work) { return !work->isCompleted(); };
  while (Clock::now() < end && std::ranges::any_of(works_, running))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::rethrow_exception(failure);
}

}  // namespace dovetail::comm

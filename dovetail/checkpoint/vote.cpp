#include "dovetail/checkpoint/vote.h"

#include <algorithm>

#include "dovetail/base/error.h"

namespace dovetail {

Ballot fault_ballot(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const FileError& e) {
    return {Ballot::Says::file_fault, e.what()};
  } catch (const ConfigError& e) {
    return {Ballot::Says::config_fault, e.what()};
  } catch (const std::exception& e) {
    return {Ballot::Says::fault, e.what()};
  }
}

Ballot attempt(const std::function<std::string()>& body) {
  try {
    return {Ballot::Says::done, body()};
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    return fault_ballot(std::current_exception());
  }
}

std::vector<Ballot> vote(comm::Group& world, const Ballot& mine, int64_t step,
                         std::string_view label) {
  const std::string message = static_cast<char>(mine.says) + mine.text;
  const auto all =
      world.gather_bytes(std::as_bytes(std::span(message)),
                         {.phase = comm::Phase::state, .unit = -1, .step = step, .label = label});
  std::vector<Ballot> ballots;
  for (const auto& bytes : all) {
    DT_CHECK(!bytes.empty(), "an empty ballot");
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    ballots.push_back({static_cast<Ballot::Says>(text[0]), std::string(text.substr(1))});
  }
  return ballots;
}

void throw_if_failed(const std::vector<Ballot>& ballots, const comm::Group& world,
                     std::string_view what) {
  const auto first = std::ranges::find_if(ballots, &Ballot::failed);
  if (first == ballots.end()) return;
  const auto others =
      std::count_if(first + 1, ballots.end(), [](const Ballot& b) { return b.failed(); });
  const std::string text = fmt::format(
      "{}: rank {}: {}{}", what, world.global_ranks()[first - ballots.begin()], first->text,
      others > 0 ? fmt::format(" (and faults on {} other ranks)", others) : "");
  if (first->says == Ballot::Says::file_fault) throw FileError(text);
  if (first->says == Ballot::Says::config_fault) throw ConfigError(text);
  throw Error(text);
}

bool any_running(const std::vector<Ballot>& ballots) {
  return std::ranges::any_of(ballots,
                             [](const Ballot& b) { return b.says == Ballot::Says::running; });
}

bool any_failed(const std::vector<Ballot>& ballots) {
  return std::ranges::any_of(ballots, &Ballot::failed);
}

std::vector<Ballot> vote_when_ended(comm::Group& world, BackgroundTask& task, int64_t step,
                                    std::string_view label) {
  for (;;) {
    Ballot mine;
    if (!task.wait_for(work_slice(world))) {
      mine.says = Ballot::Says::running;
    } else if (task.error()) {
      mine = fault_ballot(task.error());
    }
    auto ballots = vote(world, mine, step, label);
    if (!any_running(ballots)) return ballots;
  }
}

std::chrono::milliseconds work_slice(const comm::Group& world) {
  return std::clamp<std::chrono::milliseconds>(world.deadline() / 4, std::chrono::milliseconds(1),
                                               std::chrono::milliseconds(1000));
}

}  // namespace dovetail

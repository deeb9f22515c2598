// Votes of all ranks: everyone learns what everyone says, and faults become the same error
// everywhere.
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/checkpoint/background.h"
#include "dovetail/comm/group.h"

namespace dovetail {

struct Ballot {
  enum class Says : char {
    done = 'd',
    running = 'r',
    file_fault = 'f',    // FileError
    config_fault = 'c',  // ConfigError
    fault = 'x',         // any other
  };
  Says says = Says::done;
  std::string text;  // the fault, or whatever goes with the vote

  bool failed() const { return says != Says::done && says != Says::running; }
};

// The ballot of whoever caught this.
Ballot fault_ballot(const std::exception_ptr& error);

// Runs `body` and returns its text, or the fault that it threw. Lets CommErrors pass.
Ballot attempt(const std::function<std::string()>& body);

// Collective. Ballots in rank order; one control message per pair of ranks.
std::vector<Ballot> vote(comm::Group& world, const Ballot& mine, int64_t step,
                         std::string_view label);

// Throws the error of the first rank that failed, if any did: "rank 2: ...", with the number of
// others.
void throw_if_failed(const std::vector<Ballot>& ballots, const comm::Group& world,
                     std::string_view what);
bool any_running(const std::vector<Ballot>& ballots);
bool any_failed(const std::vector<Ballot>& ballots);

// Collective. Waits for the tasks of all ranks, voting often enough that none is taken for dead;
// the ballots say how each ended.
std::vector<Ballot> vote_when_ended(comm::Group& world, BackgroundTask& task, int64_t step,
                                    std::string_view label);

// The longest that a rank may work between two votes, so that the others do not take it for dead.
std::chrono::milliseconds work_slice(const comm::Group& world);

}  // namespace dovetail

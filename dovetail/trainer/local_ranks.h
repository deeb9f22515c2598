// Starts the ranks of a job as processes of this host and watches over them.
//
// The parent keeps the store in which the ranks meet, so that it outlives any of them. Each rank
// runs this same program with torchrun's variables set. SIGTERM and SIGINT go on to all ranks. When
// one fails, the others learn of it through their own deadlines and get `grace` to end by
// themselves; then they are killed. Ranks die with the parent.
//
// Their standard output is the parent's (rank 0 alone speaks there); lines on standard error get
// "[rank r]" in front.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace dovetail::trainer {

struct LocalRanks {
  std::vector<std::string> command;  // program and arguments of every rank
  int ranks = 1;
  std::chrono::milliseconds grace{60'000};
};

// Returns when all have ended: 0, or the exit code of the first that failed (128 + number for a
// signal). Call it before anything else has started threads. Throws Error when ranks cannot be
// started.
int run_local_ranks(const LocalRanks& job);

}  // namespace dovetail::trainer

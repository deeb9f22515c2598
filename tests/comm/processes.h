// Ranks as processes of the test binary itself, started in a helper mode, over a TCP store on loopback.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace dovetail::comm {

// What a rank process does; the names are the first word of its command line.
//   normal  some rounds of every collective, in the world and in groups; prints a hash of all results
//   loop    rounds without end, within pairs and across them; prints "running" after the first few
//   throw   the same, but rank 1 throws a FileError after the first rounds
//   exit    the same, but rank 1 leaves after the first rounds
//   device  some collectives on tensors, of the GPUs in turn with transport "symmetric"; prints a hash of all results
// A CommError is printed and ends the process with code 3, another error with code 4.
int rank_process(int argc, char** argv);

class RankProcesses {
 public:
  // transport: "gloo", "peer", "symmetric", or "hosts": peer with two ranks a host.
  RankProcesses(const std::string& transport, const std::string& scenario, int size,
                std::chrono::milliseconds deadline);
  ~RankProcesses();  // kills what still runs

  // Blocks until the rank has printed the text; false at the timeout or when it ended without.
  bool wait_for_output(int rank, const std::string& text, std::chrono::milliseconds timeout);
  void signal(int rank, int number);
  // Blocks until the rank has ended, returns its exit code, -1 at the timeout, 128 + n after signal n.
  int wait(int rank, std::chrono::milliseconds timeout);
  const std::string& output(int rank) const { return children_[rank].output; }
  pid_t process(int rank) const { return children_[rank].pid; }

 private:
  struct Child {
    pid_t pid = -1;
    int pipe = -1;
    std::string output;
  };
  bool read_more(Child& child, std::chrono::steady_clock::time_point until);

  std::vector<Child> children_;
};

}  // namespace dovetail::comm

#include "tests/comm/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <thread>

#include "dovetail/base/error.h"

extern char** environ;

namespace dovetail::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A listening socket on a free port, inherited by the processes to come.
int listen_anywhere(int& port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  DT_CHECK(fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, 64) == 0 &&
           getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
  port = ntohs(address.sin_port);
  return fd;
}

}  // namespace

RankProcesses::RankProcesses(const std::string& transport, const std::string& scenario, int size,
                             std::chrono::milliseconds deadline) {
  int port = 0;
  const int listener = listen_anywhere(port);
  for (int rank = 0; rank < size; ++rank) {
    int pipes[2];
    DT_CHECK_EQ(pipe2(pipes, O_CLOEXEC), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pipes[1], 1);
    if (rank != 0) posix_spawn_file_actions_addclose(&actions, listener);
    std::vector<std::string> words{"/proc/self/exe",
                                   "rank-process",
                                   transport,
                                   scenario,
                                   std::to_string(rank),
                                   std::to_string(size),
                                   std::to_string(port),
                                   std::to_string(rank == 0 ? listener : -1),
                                   std::to_string(deadline.count())};
    std::vector<char*> arguments;
    for (std::string& w : words) arguments.push_back(w.data());
    arguments.push_back(nullptr);
    Child child;
    DT_CHECK_EQ(posix_spawn(&child.pid, "/proc/self/exe", &actions, nullptr, arguments.data(), environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(pipes[1]);
    child.pipe = pipes[0];
    children_.push_back(std::move(child));
  }
  close(listener);
}

RankProcesses::~RankProcesses() {
  for (Child& child : children_) {
    if (child.pid > 0) {
      kill(child.pid, SIGKILL);
      waitpid(child.pid, nullptr, 0);
    }
    close(child.pipe);
  }
}

void RankProcesses::signal(int rank, int number) { kill(children_[rank].pid, number); }

bool RankProcesses::read_more(Child& child, Clock::time_point until) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
  pollfd waiting{child.pipe, POLLIN, 0};
  if (left <= 0 || poll(&waiting, 1, static_cast<int>(left)) <= 0) return false;
  char buffer[4096];
  const ssize_t n = read(child.pipe, buffer, sizeof buffer);
  if (n <= 0) return false;
  child.output.append(buffer, static_cast<size_t>(n));
  return true;
}

bool RankProcesses::wait_for_output(int rank, const std::string& text, std::chrono::milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  Child& child = children_[rank];
  while (child.output.find(text) == std::string::npos) {
    if (!read_more(child, until)) return false;
  }
  return true;
}

int RankProcesses::wait(int rank, std::chrono::milliseconds timeout) {
  const auto until = Clock::now() + timeout;
  Child& child = children_[rank];
  while (read_more(child, until)) {
  }
  int status = 0;
  for (;;) {
    const pid_t ended = waitpid(child.pid, &status, WNOHANG);
    if (ended == child.pid) break;
    if (Clock::now() >= until) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  child.pid = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace dovetail::comm

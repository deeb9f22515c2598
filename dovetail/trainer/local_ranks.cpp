#include "dovetail/trainer/local_ranks.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "dovetail/base/error.h"

namespace dovetail::trainer {
namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(const char* what) {
  raise<Error>("launch: cannot {}: {}", what, std::strerror(errno));
}

sigset_t watched_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (int signal : {SIGCHLD, SIGTERM, SIGINT}) sigaddset(&set, signal);
  return set;
}

// Signals arrive as data while this lives. Made before the store, whose threads inherit the mask.
class SignalQueue {
 public:
  SignalQueue() {
    const sigset_t set = watched_signals();
    pthread_sigmask(SIG_BLOCK, &set, &old_);
    fd_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd_ < 0) fail("watch signals");
  }
  ~SignalQueue() {
    ::close(fd_);
    pthread_sigmask(SIG_SETMASK, &old_, nullptr);
  }
  int fd() const { return fd_; }
  const sigset_t& old_mask() const { return old_; }
  std::optional<int> next() {
    signalfd_siginfo info;
    if (::read(fd_, &info, sizeof info) != sizeof info) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  int fd_;
  sigset_t old_;
};

class RankProcess {
 public:
  RankProcess(int rank, pid_t pid, int errors) : rank_(rank), pid_(pid), errors_(errors) {}
  ~RankProcess() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    if (errors_ >= 0) ::close(errors_);
  }
  RankProcess(const RankProcess&) = delete;

  int rank() const { return rank_; }
  int errors() const { return errors_; }
  bool ended() const { return ended_; }
  int code() const { return code_; }
  void signal(int signal) const {
    if (!ended_) ::kill(pid_, signal);
  }

  // True when it has just ended.
  bool reap() {
    int status = 0;
    if (ended_ || ::waitpid(pid_, &status, WNOHANG) != pid_) return false;
    ended_ = true;
    code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    return true;
  }
  std::string how_it_ended() const {
    if (code_ > 128)
      return fmt::format("was ended by signal {} ({})", code_ - 128, ::strsignal(code_ - 128));
    return fmt::format("ended with code {}", code_);
  }

  // Passes whole lines of what it wrote to standard error to `print`; everything once it has closed
  // it.
  template <class Print>
  void forward_errors(Print&& print) {
    char buffer[4096];
    ssize_t n;
    while ((n = ::read(errors_, buffer, sizeof buffer)) > 0)
      text_.append(buffer, static_cast<size_t>(n));
    const bool closed = n == 0;
    for (size_t end; (end = text_.find('\n')) != std::string::npos; text_.erase(0, end + 1))
      print(rank_, text_.substr(0, end));
    if (!closed) return;
    if (!text_.empty()) print(rank_, std::exchange(text_, {}));
    ::close(std::exchange(errors_, -1));
  }

 private:
  const int rank_;
  const pid_t pid_;
  int errors_;
  bool ended_ = false;
  int code_ = 0;
  std::string text_;
};

std::vector<std::string> environment_of(int rank, int ranks, int port) {
  std::map<std::string, std::string, std::less<>> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text = *entry;
    variables.insert_or_assign(std::string(text.substr(0, text.find('='))), std::string(text));
  }
  auto set = [&](const char* name, const std::string& value) {
    variables[name] = std::string(name) + "=" + value;
  };
  set("RANK", std::to_string(rank));
  set("WORLD_SIZE", std::to_string(ranks));
  set("LOCAL_RANK", std::to_string(rank));
  set("LOCAL_WORLD_SIZE", std::to_string(ranks));
  set("MASTER_ADDR", "127.0.0.1");
  set("MASTER_PORT", std::to_string(port));
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  std::vector<std::string> out;
  for (auto& [name, entry] : variables) out.push_back(std::move(entry));
  return out;
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& s : strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::unique_ptr<RankProcess> start_rank(const LocalRanks& job, int rank, int port,
                                        const sigset_t& mask) {
  std::vector<std::string> command = job.command,
                           environment = environment_of(rank, job.ranks, port);
  const std::vector<char*> argv = pointers_to(command), envp = pointers_to(environment);
  int errors[2];
  if (::pipe2(errors, O_CLOEXEC) != 0) fail("make a pipe");
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail("start a rank");
  if (pid == 0) {     // nothing but system calls from here on
    ::setpgid(0, 0);  // signals from the terminal come through the parent only
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(errors[1], STDERR_FILENO);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execve("/proc/self/exe", argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(errors[1]);
  ::fcntl(errors[0], F_SETFL, O_NONBLOCK);
  return std::make_unique<RankProcess>(rank, pid, errors[0]);
}

class Watch {
 public:
  Watch(std::vector<std::unique_ptr<RankProcess>> ranks, SignalQueue& signals,
        std::chrono::milliseconds grace)
      : ranks_(std::move(ranks)), signals_(signals), grace_(grace) {}

  int run() {
    while (!all_ended()) {
      wait_for_news();
      forward_errors();
      while (const auto signal = signals_.next())
        if (*signal != SIGCHLD)
          for (auto& rank : ranks_) rank->signal(*signal);
      for (auto& rank : ranks_) {
        if (!rank->reap()) continue;
        forward_errors();
        if (rank->code() != 0) note_failure(*rank);
      }
      if (kill_at_ && Clock::now() >= *kill_at_)
        for (auto& rank : ranks_) rank->signal(SIGKILL);
    }
    forward_errors();
    return code_;
  }

 private:
  bool all_ended() const {
    for (const auto& rank : ranks_)
      if (!rank->ended()) return false;
    return true;
  }

  void wait_for_news() {
    std::vector<pollfd> fds{{signals_.fd(), POLLIN, 0}};
    for (const auto& rank : ranks_)
      if (rank->errors() >= 0) fds.push_back({rank->errors(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), 200);
  }

  void forward_errors() {
    for (auto& rank : ranks_)
      if (rank->errors() >= 0)
        rank->forward_errors([this](int r, const std::string& line) { print(r, line); });
  }

  // What all ranks find wrong they all say: once is enough.
  void print(int rank, const std::string& line) {
    if (line.starts_with("dovetail: error: ") && !errors_said_.insert(line).second) return;
    fmt::print(stderr, "[rank {}] {}\n", rank, line);
  }

  void note_failure(const RankProcess& rank) {
    // Who ends with a code has said why.
    if (rank.code() > 128 || errors_said_.empty())
      fmt::print(stderr, "dovetail: rank {} {}\n", rank.rank(), rank.how_it_ended());
    if (code_ != 0) return;
    code_ = rank.code();
    kill_at_ = Clock::now() + grace_;
  }

  std::vector<std::unique_ptr<RankProcess>> ranks_;
  SignalQueue& signals_;
  const std::chrono::milliseconds grace_;
  std::optional<Clock::time_point> kill_at_;
  std::set<std::string> errors_said_;
  int code_ = 0;
};

}  // namespace

int run_local_ranks(const LocalRanks& job) {
  SignalQueue signals;
  c10d::TCPStoreOptions options;
  options.port = 0;  // any free one
  options.isServer = true;
  options.waitWorkers = false;
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<std::unique_ptr<RankProcess>> ranks;
  for (int rank = 0; rank < job.ranks; ++rank)
    ranks.push_back(start_rank(job, rank, store->getPort(), signals.old_mask()));
  return Watch(std::move(ranks), signals, job.grace).run();
}

}  // namespace dovetail::trainer

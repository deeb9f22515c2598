#include "tests/trainer/process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace dovetail {
namespace {

constexpr const char* kProgram = DOVETAIL_BINARY_DIR "/bin/dovetail";
constexpr const char* kLauncherVariables[] = {"RANK",
                                              "WORLD_SIZE",
                                              "LOCAL_RANK",
                                              "LOCAL_WORLD_SIZE",
                                              "MASTER_ADDR",
                                              "MASTER_PORT",
                                              "TORCHELASTIC_USE_AGENT_STORE"};

std::string contents(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

Program::Program(const std::vector<std::string>& arguments, const std::string& output_file,
                 const Variables& variables)
    : output_file_(output_file) {
  std::vector<char*> argv{const_cast<char*>(kProgram)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw std::runtime_error("cannot fork");
  if (pid_ > 0) return;
  for (const char* name : kLauncherVariables) ::unsetenv(name);
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
  const int fd = ::open(output_file.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_TRUNC, 0644);
  ::dup2(fd, STDOUT_FILENO);
  ::dup2(fd, STDERR_FILENO);
  ::execv(kProgram, argv.data());
  ::_exit(127);
}

Program::~Program() {
  if (ended_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Program::signal(int signal) const { ::kill(pid_, signal); }

bool Program::running() {
  if (!ended_) ended_ = ::waitpid(pid_, &status_, WNOHANG) == pid_;
  return !ended_;
}

int Program::wait(std::chrono::seconds at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  while (running()) {
    if (std::chrono::steady_clock::now() > until) return -1;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return WIFSIGNALED(status_) ? 128 + WTERMSIG(status_) : WEXITSTATUS(status_);
}

std::string Program::output() const { return contents(output_file_); }

std::vector<pid_t> Program::children() const {
  const std::string pid = std::to_string(pid_);
  std::istringstream list(contents("/proc/" + pid + "/task/" + pid + "/children"));
  std::vector<pid_t> pids;
  for (pid_t child; list >> child;) pids.push_back(child);
  return pids;
}

Ended run_program(const std::vector<std::string>& arguments, const std::string& output_file,
                  const Program::Variables& variables) {
  Program program(arguments, output_file, variables);
  const int code = program.wait();
  return {code, program.output()};
}

}  // namespace dovetail

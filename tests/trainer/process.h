// The program itself as a child process, as a user would run it.
#pragma once

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace dovetail {

class Program {
 public:
  using Variables = std::vector<std::pair<std::string, std::string>>;

  // Starts build/bin/dovetail with the arguments, its output going to a file.
  Program(const std::vector<std::string>& arguments, const std::string& output_file,
          const Variables& variables = {});
  ~Program();  // kills it
  Program(const Program&) = delete;

  void signal(int signal) const;
  // Exit code (128 + number for a signal); -1 when it still ran after that time, and is killed.
  int wait(std::chrono::seconds at_most = std::chrono::seconds(120));
  bool running();
  std::string output() const;

  // Processes that it has started and that still run.
  std::vector<pid_t> children() const;

 private:
  pid_t pid_;
  std::string output_file_;
  int status_ = 0;
  bool ended_ = false;
};

struct Ended {
  int code;
  std::string output;
};
Ended run_program(const std::vector<std::string>& arguments, const std::string& output_file,
                  const Program::Variables& variables = {});

}  // namespace dovetail

// Wishes to end the run: SIGTERM and SIGINT set a flag that the training loop looks at once a step.
// A second signal of the same kind ends the process at once.
#pragma once

namespace dovetail::trainer {

// Installs the handlers for its lifetime. At most one at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;

  bool raised() const;
  // "SIGTERM"; empty when none came.
  const char* name() const;
};

}  // namespace dovetail::trainer

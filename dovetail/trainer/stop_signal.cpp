#include "dovetail/trainer/stop_signal.h"

#include <csignal>

namespace dovetail::trainer {
namespace {

// A signal handler can reach nothing but a global.
volatile std::sig_atomic_t g_signal = 0;

void remember(int signal) { g_signal = signal; }

void handle(int signal, void (*handler)(int), int flags) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = flags;
  sigaction(signal, &action, nullptr);
}

}  // namespace

StopSignal::StopSignal() {
  g_signal = 0;
  for (int signal : {SIGTERM, SIGINT})
    handle(signal, remember, static_cast<int>(SA_RESTART | SA_RESETHAND));
}

StopSignal::~StopSignal() {
  for (int signal : {SIGTERM, SIGINT}) handle(signal, SIG_DFL, 0);
}

bool StopSignal::raised() const { return g_signal != 0; }

const char* StopSignal::name() const {
  return g_signal == SIGTERM ? "SIGTERM" : g_signal == SIGINT ? "SIGINT" : "";
}

}  // namespace dovetail::trainer

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include "dovetail/comm/c10d/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <csignal>

namespace dovetail::comm {
namespace {

// Gloo writes to sockets without MSG_NOSIGNAL: where SIGPIPE has its default action, a peer that has closed would end
// this process without a word instead of becoming a CommError. Python ignores the signal, so torch never sees this.
void ignore_broken_pipes() {
  struct sigaction now {};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

}  // namespace

c10::intrusive_ptr<::c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size, const GlooOptions& options) {
  using Gloo = ::c10d::ProcessGroupGloo;
  ignore_broken_pipes();
  auto gloo = Gloo::Options::create(options.connect);
  if (!options.interface.empty()) {
    gloo->devices.push_back(Gloo::createDeviceForInterface(options.interface));
  } else if (!options.hostname.empty()) {
    gloo->devices.push_back(Gloo::createDeviceForHostname(options.hostname));
  } else {
    gloo->devices.push_back(Gloo::createDefaultDevice());
  }
  return c10::make_intrusive<Gloo>(store, rank, size, gloo);
}

}  // namespace dovetail::comm

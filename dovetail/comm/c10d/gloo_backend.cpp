#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include "dovetail/comm/c10d/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace dovetail::comm {

c10::intrusive_ptr<::c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size, const GlooOptions& options) {
  using Gloo = ::c10d::ProcessGroupGloo;
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

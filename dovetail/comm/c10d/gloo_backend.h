// Gloo from C++. The wheel of torch has Gloo's code but not its headers; the system's headers (libgloo-dev) declare
// the few calls that are needed, and only gloo_backend.cpp includes them.
#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace dovetail::comm {

struct GlooOptions {
  std::string hostname;   // address to bind to; empty: what this machine's name resolves to
  std::string interface;  // network interface; takes precedence over hostname
  std::chrono::milliseconds connect{60'000};
};

// Connects to all other ranks of the store. Throws what Gloo throws. Where SIGPIPE has its default
// action it is ignored from here on: writing to a peer that has closed is an error of that call.
c10::intrusive_ptr<::c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size, const GlooOptions& options);

}  // namespace dovetail::comm

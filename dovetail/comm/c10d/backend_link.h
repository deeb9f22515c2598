// A Link over the send and receive of a c10d backend that knows tags (Gloo).
#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dovetail/comm/c10d/heartbeat.h"
#include "dovetail/comm/link.h"

namespace dovetail::comm {

// Owns the connections, the heartbeat and, where this rank holds it, the store; destroyed in this order.
std::unique_ptr<Link> make_backend_link(c10::intrusive_ptr<::c10d::Store> store, std::unique_ptr<Heartbeat> heartbeat,
                                        c10::intrusive_ptr<::c10d::Backend> backend);

}  // namespace dovetail::comm

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "dovetail/base/error.h"
#include "dovetail/comm/c10d/world.h"
#include "dovetail/comm/p2p_group.h"
#include "dovetail/comm/threads/hub.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

std::shared_ptr<comm::Group> make_world(const c10::intrusive_ptr<::c10d::Store>& store, int rank, int size,
                                        const std::string& name, const std::string& backend, double deadline) {
  const std::chrono::milliseconds limit(static_cast<int64_t>(deadline * 1000));
  if (size == 1) return comm::make_p2p_world(comm::make_thread_link(std::make_shared<comm::Hub>(1), 0), limit);
  comm::WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.store = store;
  options.name = name;
  options.deadline = options.connect = limit;
  if (backend == "auto" || backend == "peer")
    options.peers = comm::PeerOptions{.required = backend == "peer"};
  else if (backend != "c10d")
    raise<ConfigError>("comm: wanted \"auto\", \"peer\" or \"c10d\", got \"{}\"", backend);
  return comm::make_world(options);
}

}  // namespace

void bind_comm(py::module_& m) {
  py::class_<comm::Group, std::shared_ptr<comm::Group>>(m, "Group")
      .def("bytes_sent", [](const comm::Group& g) { return g.counters().read().sent(); });
  m.def("make_world", &make_world, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("name"),
        py::arg("backend"), py::arg("deadline"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace dovetail::python

#include "dovetail/base/error.h"
#include "python/bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
  namespace py = pybind11;
  using namespace dovetail;
  m.doc() = "The C++ core of dovetail. Use the package; this module has no checks of its own.";
  // ConfigError is a ValueError: what a call was given is wrong. The others are RuntimeErrors.
  py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<ConfigError>(m, "ConfigError", PyExc_ValueError);
  const py::object base = m.attr("Error");
  py::register_exception<PlanError>(m, "PlanError", base);
  py::register_exception<CommError>(m, "CommError", base);
  py::register_exception<StateError>(m, "StateError", base);
  py::register_exception<FileError>(m, "FileError", base);
  python::bind_comm(m);
  python::bind_plan(m);
  python::bind_update(m);
  python::bind_checkpoint(m);
  python::bind_memory(m);
  python::bind_nn(m);
  python::bind_engine(m);
}

// The Python module dovetail._C: one file for each layer, no logic.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

namespace dovetail::python {

namespace py = pybind11;

void bind_comm(py::module_& m);
void bind_plan(py::module_& m);
void bind_update(py::module_& m);
void bind_checkpoint(py::module_& m);
void bind_memory(py::module_& m);
void bind_nn(py::module_& m);
void bind_engine(py::module_& m);

// A Python callable that C++ may call and drop without the interpreter's lock. None: an empty function.
template <class... Args>
std::function<void(Args...)> callback(py::object callable) {
  if (callable.is_none()) return {};
  std::shared_ptr<py::object> held(new py::object(std::move(callable)), [](py::object* o) {
    py::gil_scoped_acquire lock;
    delete o;
  });
  return [held](Args... args) {
    py::gil_scoped_acquire lock;
    (*held)(args...);
  };
}

}  // namespace dovetail::python

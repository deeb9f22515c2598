#include "dovetail/storage/tensor_heap.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {

void bind_memory(py::module_& m) {
  py::class_<TensorHeap, std::unique_ptr<TensorHeap, py::nodelete>>(m, "TensorHeap")
      .def("switch_on", &TensorHeap::switch_on)
      .def("trim", [](TensorHeap& heap) { heap.pages().trim(); })
      .def("use", [](TensorHeap& heap) {
        const PageHeap::Use use = heap.pages().use();
        return std::tuple(use.in_use, use.held, use.most_in_use);
      });
  m.def("install_tensor_heap", &TensorHeap::install, py::return_value_policy::reference);
  m.def("tensor_heap", &TensorHeap::installed, py::return_value_policy::reference);
}

}  // namespace dovetail::python

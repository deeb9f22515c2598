#include "dovetail/ops/gradient_sink.h"
#include "dovetail/ops/linear.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {

void bind_nn(py::module_& m) {
  py::class_<ops::GradientSink, std::shared_ptr<ops::GradientSink>>(m, "GradientSink");
  m.def("linear", [](const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     const std::shared_ptr<ops::GradientSink>& sink) {
    return ops::linear_layer(x, weight, bias.value_or(at::Tensor()), ops::Matmul(), sink);
  }, py::call_guard<py::gil_scoped_release>());
}

}  // namespace dovetail::python

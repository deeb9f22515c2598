#include "dovetail/update/optimizer.h"

#include <pybind11/stl.h>

#include "python/bindings/bindings.h"

namespace dovetail::python {

void bind_update(py::module_& m) {
  py::class_<ParameterRule>(m, "ParameterRule")
      .def(py::init([](const std::string& pattern, double lr_scale, std::optional<double> weight_decay,
                       const std::string& optimizer) {
             return ParameterRule{pattern, lr_scale, weight_decay, optimizer};
           }),
           py::arg("pattern"), py::arg("lr_scale") = 1.0, py::arg("weight_decay") = std::nullopt,
           py::arg("optimizer") = "");
  py::class_<OptimizerOptions>(m, "OptimizerOptions")
      .def(py::init<>())
      .def_readwrite("name", &OptimizerOptions::name)
      .def("set_adamw", [](OptimizerOptions& o, double b1, double b2, double eps) { o.adamw = {b1, b2, eps}; })
      .def("set_sgd", [](OptimizerOptions& o, double momentum, double dampening, bool nesterov, bool decoupled) {
        o.sgd = {momentum, dampening, nesterov, decoupled ? Decay::decoupled : Decay::l2};
      })
      .def("set_muon", [](OptimizerOptions& o, double momentum, bool nesterov, const std::string& unit) {
        o.muon.momentum = momentum;
        o.muon.nesterov = nesterov;
        o.muon.unit = unit;
      })
      .def("set_shampoo", [](OptimizerOptions& o, double beta1, double beta2, double epsilon, int64_t block,
                             int64_t every) {
        o.shampoo.beta1 = beta1;
        o.shampoo.beta2 = beta2;
        o.shampoo.epsilon = epsilon;
        o.shampoo.block = block;
        o.shampoo.every = every;
      })
      .def("set_rules", [](OptimizerOptions& o, double weight_decay, bool decay_vectors,
                           std::vector<ParameterRule> rules) {
        o.rules.weight_decay = weight_decay;
        o.rules.decay_vectors = decay_vectors;
        o.rules.rules = std::move(rules);
      });
}

}  // namespace dovetail::python

#include "dovetail/engine/engine.h"

#include <pybind11/stl.h>

#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

std::vector<at::Tensor*> pointers(std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor*> out;
  for (at::Tensor& t : tensors) out.push_back(&t);
  return out;
}

}  // namespace

void bind_engine(py::module_& m) {
  using Operations = std::vector<std::shared_ptr<UpdateOp>>;
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<UnitParameter>(m, "UnitParameter")
      .def(py::init([](const std::string& name, at::Tensor tensor, std::vector<int64_t> shape, at::Tensor values) {
        return UnitParameter{name, std::move(tensor), MainShard{std::move(shape), std::move(values)}};
      }));
  py::class_<ModelUnit>(m, "ModelUnit")
      .def(py::init([](const std::string& name, std::vector<UnitParameter> parameters, const std::string& format,
                       std::optional<bool> keep_after_forward, bool behind_units, py::object residence_changed) {
             return ModelUnit{.name = name, .parameters = std::move(parameters), .format = format,
                              .keep_after_forward = keep_after_forward, .behind_units = behind_units,
                              .residence_changed = callback<bool>(std::move(residence_changed))};
           }),
           py::arg("name"), py::arg("parameters"), py::arg("format"), py::arg("keep_after_forward"),
           py::arg("behind_units"),
           py::arg("residence_changed"));

  py::class_<UpdateParameter>(m, "UpdateParameter")
      .def_readonly("main", &UpdateParameter::main)
      .def_readonly("grad", &UpdateParameter::grad);
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("clip_coefficient", &StepResult::clip_coefficient)
      .def_readonly("skipped", &StepResult::skipped);

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](std::vector<ModelUnit> units, std::shared_ptr<comm::Group> world,
                       const plan::PlanOptions& plan, std::vector<TensorSpec> hints) {
             UnitModel model{.units = std::move(units), .aliases = {}, .buffers = {}};
             EngineOptions options;
             options.plan = plan;
             options.cast_inputs = false;  // the package casts the inputs of each unit, as torch does
             options.hints = std::move(hints);
             return std::make_shared<Engine>(std::move(model), std::move(world), std::move(options), UpdateOps{});
           }),
           Unlocked())
      .def("before_forward", [](Engine& e, int64_t unit, std::vector<at::Tensor> inputs) {
        const auto tensors = pointers(inputs);
        e.hooks(unit)->before_forward(tensors);
        return inputs;
      }, Unlocked())
      .def("after_forward", [](Engine& e, int64_t unit, std::vector<at::Tensor> outputs) {
        const auto tensors = pointers(outputs);
        e.hooks(unit)->after_forward(tensors);
        return outputs;
      }, Unlocked())
      .def("forward_failed", [](Engine& e, int64_t unit) { e.hooks(unit)->forward_failed(); }, Unlocked())
      .def("gather", &Engine::gather, Unlocked())
      .def("release", &Engine::release, Unlocked())
      .def("gather_all", &Engine::gather_all, Unlocked())
      .def("release_all", &Engine::release_all, Unlocked())
      .def("in_backward", &Engine::in_backward, Unlocked())
      .def("broken_backwards", &Engine::broken_backwards)
      .def("on_backward", [](Engine& e, py::object begin, py::object end) {
        e.on_backward(callback<>(std::move(begin)), callback<>(std::move(end)));
      })
      .def("discard_gradients", &Engine::discard_gradients, Unlocked())
      .def("have_gradients", &Engine::have_gradients, Unlocked())
      .def("set_gradient_sync", &Engine::set_gradient_sync)
      .def("set_gradient_factor", &Engine::set_gradient_factor)
      .def("set_gradient_completion", &Engine::set_gradient_completion)
      .def("set_operations", [](Engine& e, const Operations& ops) { e.set_operations({ops.begin(), ops.end()}); },
           Unlocked())
      .def("change_operations", [](Engine& e, const Operations& ops) { e.change_operations({ops.begin(), ops.end()}); },
           Unlocked())
      .def("sink", &Engine::sink)
      .def("step", &Engine::step, Unlocked())
      .def("zero_grad", &Engine::zero_grad, Unlocked())
      .def("parameters", &Engine::parameters)
      .def("state", &Engine::state)
      .def("state_was_loaded", &Engine::state_was_loaded)
      .def("steps_done", &Engine::steps_done)
      .def("set_steps_done", &Engine::set_steps_done)
      .def("describe_optimizer", &Engine::describe_optimizer);
}

}  // namespace dovetail::python

#include "dovetail/engine/engine.h"

#include <pybind11/stl.h>

#include "dovetail/update/optimizer.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

std::vector<at::Tensor*> pointers(std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor*> out;
  for (at::Tensor& t : tensors) out.push_back(&t);
  return out;
}

py::dict to_dict(const plan::HeldBytes& held) {
  py::dict d;
  d["main"] = held.main;
  d["runtime"] = held.runtime;
  d["gradient"] = held.gradient;
  d["main_gradient"] = held.main_gradient;
  d["accumulator"] = held.accumulator;
  d["state"] = held.state;
  d["slots"] = held.slots;
  d["unit_state"] = held.unit_state;
  d["staging"] = held.staging;
  d["workspace"] = held.workspace;
  return d;
}

}  // namespace

void bind_engine(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;

  py::class_<UnitParameter>(m, "UnitParameter")
      .def(py::init([](const std::string& name, at::Tensor tensor, std::vector<int64_t> shape, at::Tensor values) {
        return UnitParameter{name, std::move(tensor), MainShard{std::move(shape), std::move(values)}};
      }));
  py::class_<ModelUnit>(m, "ModelUnit")
      .def(py::init([](const std::string& name, std::vector<UnitParameter> parameters, py::object residence_changed) {
        return ModelUnit{.name = name, .parameters = std::move(parameters),
                         .residence_changed = callback<bool>(std::move(residence_changed))};
      }));

  py::class_<UpdateParameter>(m, "UpdateParameter")
      .def_property_readonly("name", [](const UpdateParameter& p) { return p.spec->name; })
      .def_property_readonly("elements",
                             [](const UpdateParameter& p) { return std::pair(p.elements.begin, p.elements.end); })
      .def_readonly("main", &UpdateParameter::main)
      .def_readonly("grad", &UpdateParameter::grad)
      .def_readonly("has_gradient", &UpdateParameter::has_gradient);
  py::class_<StepResult>(m, "StepResult")
      .def_readonly("grad_norm", &StepResult::grad_norm)
      .def_readonly("clip_coefficient", &StepResult::clip_coefficient)
      .def_readonly("skipped", &StepResult::skipped);
  py::class_<ops::GradientSink, std::shared_ptr<ops::GradientSink>>(m, "GradientSink")
      .def("next_contribution", [](ops::GradientSink& sink) -> std::optional<std::pair<at::Tensor, bool>> {
        const auto target = sink.next_contribution();
        if (!target) return std::nullopt;
        return std::pair(target->view, target->fresh);
      }, Unlocked());

  py::class_<Engine, std::shared_ptr<Engine>>(m, "Engine")
      .def(py::init([](std::vector<ModelUnit> units, std::vector<std::pair<std::string, std::string>> aliases,
                       std::shared_ptr<comm::Group> world, const plan::PlanOptions& plan,
                       std::vector<TensorSpec> hints, bool cast_inputs, uint64_t seed) {
             UnitModel model{.units = std::move(units), .aliases = {}, .buffers = {}};
             for (auto& [alias, name] : aliases) model.aliases.push_back({std::move(alias), std::move(name)});
             EngineOptions options;
             options.plan = plan;
             options.cast_inputs = cast_inputs;
             options.seed = seed;
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
      .def("sink", &Engine::sink)
      .def("on_backward", [](Engine& e, py::object begin, py::object end) {
        e.on_backward(callback<>(std::move(begin)), callback<>(std::move(end)));
      })
      .def("discard_gradients", &Engine::discard_gradients, Unlocked())
      .def("contributed", &Engine::contributed, Unlocked())
      .def("set_gradient_sync", &Engine::set_gradient_sync)
      .def("set_gradient_factor", &Engine::set_gradient_factor)
      .def("set_operations", [](Engine& e, const OptimizerOptions& options, const std::vector<TensorSpec>& tensors) {
        e.set_operations(make_optimizer(options, tensors));
      }, Unlocked())
      .def("step", &Engine::step, Unlocked())
      .def("zero_grad", &Engine::zero_grad, Unlocked())
      .def_property("steps_done", &Engine::steps_done, &Engine::set_steps_done)
      .def("parameters", &Engine::parameters)
      .def("describe_optimizer", &Engine::describe_optimizer)
      .def("held", [](const Engine& e) { return to_dict(e.held()); })
      .def("predicted_held", [](const Engine& e) { return to_dict(e.predicted_held()); })
      .def("plan_text", [](const Engine& e) { return plan::to_text(e.plan()); })
      .def("planned_bytes", [](const Engine& e, int64_t rank, int64_t micro_batches) {
        plan::StepShape shape;
        shape.micro_batches = micro_batches;
        return plan::sent_bytes(e.plan(), rank, shape).total();
      }, py::arg("rank"), py::arg("micro_batches") = 1);
}

}  // namespace dovetail::python

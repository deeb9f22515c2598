#include "dovetail/update/optimizer.h"

#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>

#include "dovetail/storage/views.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

// An operation whose methods are Python's (dovetail.optim.Operation says what each gives and takes).
class PythonOperation : public UpdateOp {
 public:
  PythonOperation(std::string name, std::string description, py::object object)
      : name_(std::move(name)), description_(std::move(description)),
        object_(new py::object(std::move(object)), [](py::object* o) {
          py::gil_scoped_acquire lock;
          delete o;
        }) {}

  std::string_view name() const override { return name_; }
  std::string describe() const override { return description_; }

  bool applies_to(const TensorSpec& t) const override {
    py::gil_scoped_acquire lock;
    return object_->attr("_applies_to")(t).cast<bool>();
  }

  Unit unit(const TensorSpec& t) const override {
    py::gil_scoped_acquire lock;
    const auto [kind, first, second] =
        object_->attr("_unit")(t).cast<std::tuple<std::string, int64_t, int64_t>>();
    if (kind == "element") return {};
    if (kind == "block") return Unit::of_block(first);
    if (kind == "row") return Unit::of_row();
    if (kind == "matrix") return Unit::of_matrix();
    if (kind == "tile") return Unit::of_tile(first, second);
    return Unit::of_node(kind);
  }

  std::vector<FieldUse> uses(const TensorSpec& t) const override {
    std::vector<FieldUse> fields = {{std::string(kWeight), Access::read_write}, {std::string(kGrad), Access::read}};
    for (const StateField& f : state(t)) fields.push_back({f.name, Access::read_write});
    return fields;
  }

  std::vector<StateField> state(const TensorSpec& t) const override {
    py::gil_scoped_acquire lock;
    std::vector<StateField> fields;
    for (const auto& [name, initial] : object_->attr("_state")(t).cast<std::vector<std::pair<std::string, float>>>())
      fields.push_back({.name = name, .initial = initial});
    return fields;
  }

  double cost(const TensorSpec& t, const UnitPlace& place) const override {
    py::gil_scoped_acquire lock;
    return object_->attr("_cost")(t, place.rows, place.columns).cast<double>();
  }

  void run(const UnitView& view, const StepContext& context) const override {
    py::gil_scoped_acquire lock;
    std::vector<std::pair<std::string, at::Tensor>> fields;
    const bool matrix = view.unit >= 0;
    for (const Field& f : view.fields) {
      const auto options = at::TensorOptions().dtype(scalar_type_of(f.dtype));
      fields.emplace_back(f.name, matrix ? at::from_blob(f.data, {view.place.rows, view.place.columns},
                                                         {view.row_stride, 1}, options)
                                         : at::from_blob(f.data, {view.place.columns}, options));
    }
    object_->attr("_run")(*view.tensor, fields, view.place.first, context.step, context.grad_scale);
  }

 private:
  std::string name_, description_;
  std::shared_ptr<py::object> object_;
};

}  // namespace

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
  py::class_<UpdateOp, std::shared_ptr<UpdateOp>>(m, "UpdateOp");
  m.def("make_optimizer", [](const OptimizerOptions& options, const std::vector<TensorSpec>& tensors) {
    std::vector<std::shared_ptr<UpdateOp>> ops;
    for (const auto& op : make_optimizer(options, tensors)) ops.push_back(std::const_pointer_cast<UpdateOp>(op));
    return ops;
  });
  m.def("make_operation", [](const std::string& name, const std::string& description, py::object object) {
    return std::shared_ptr<UpdateOp>(std::make_shared<PythonOperation>(name, description, std::move(object)));
  });
}

}  // namespace dovetail::python

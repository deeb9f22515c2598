#include <pybind11/stl.h>

#include "dovetail/layout/block.h"
#include "dovetail/plan/plan.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

// Per tensor and rank of the first replica, its zero1 shard: [begin, end) of the row-major tensor; (0, 0) for none.
std::vector<std::vector<std::pair<int64_t, int64_t>>> shard_intervals(const plan::PlanOptions& options,
                                                                      const plan::GroupSpec& group) {
  const plan::Plan plan = plan::make_plan(options, {group});
  std::vector<std::vector<std::pair<int64_t, int64_t>>> all;
  for (const plan::TensorPlace& place : plan::tensor_places(plan)) {
    std::vector<std::pair<int64_t, int64_t>>& shards = all.emplace_back();
    for (int64_t rank = 0; rank < options.degrees.zero1; ++rank) {
      const int64_t q = plan::zero1_shard(options.degrees, plan::position_of(options.degrees, rank));
      const Interval part = place.segment ? intersect(place.segment->zero1_interval(q), place.placement->interval())
                                          : Interval{};
      if (part.empty())
        shards.push_back({0, 0});
      else
        shards.push_back({part.begin - place.placement->offset, part.end - place.placement->offset});
    }
  }
  return all;
}

}  // namespace

void bind_plan(py::module_& m) {
  using plan::PlanOptions;
  py::class_<PlanOptions>(m, "PlanOptions")
      .def(py::init<>())
      .def_readwrite("world", &PlanOptions::world)
      .def_readwrite("format", &PlanOptions::format)
      .def_readwrite("alignment", &PlanOptions::alignment)
      .def_readwrite("segments", &PlanOptions::segments)
      .def_readwrite("prefetch", &PlanOptions::prefetch)
      .def_readwrite("pending_reductions", &PlanOptions::pending_reductions)
      .def_readwrite("local_accumulation", &PlanOptions::local_accumulation)
      .def_property_readonly("zero1", [](const PlanOptions& o) { return o.degrees.zero1; })
      .def_property_readonly("zero2", [](const PlanOptions& o) { return o.degrees.zero2; })
      .def("set_degrees", [](PlanOptions& o, int64_t zero1, int64_t zero2, int64_t zero3) {
        o.degrees = {zero1, zero2, zero3};
      })
      .def("set_block", [](PlanOptions& o, const std::string& name) { o.block = parse_block_kind(name); })
      .def("set_boundary", [](PlanOptions& o, const std::string& name) { o.boundary = plan::parse_boundary(name); })
      .def("validate", [](const PlanOptions& o) { plan::validate(o); });
  py::class_<TensorSpec>(m, "TensorSpec")
      .def(py::init([](const std::string& name, std::vector<int64_t> shape, const std::string& kind) {
        TensorSpec spec{.name = name, .shape = std::move(shape)};
        spec.kind = kind.empty() ? kind_of_shape(spec.shape) : parse_param_kind(kind);
        plan::validate(spec);
        return spec;
      }))
      .def_readonly("name", &TensorSpec::name)
      .def_readonly("shape", &TensorSpec::shape)
      .def("set_heads", [](TensorSpec& t, int64_t heads, int dim) {
        t.heads = heads;
        t.heads_dim = dim;
        plan::validate(t);
      })
      .def("add_nodes", [](TensorSpec& t, const std::string& name, int dim, std::vector<int64_t> edges) {
        t.nodes.push_back({name, dim, std::move(edges)});
        validate_nodes(t, t.nodes.back());
      });
  py::class_<plan::GroupSpec>(m, "GroupSpec")
      .def(py::init([](const std::string& name, std::vector<TensorSpec> tensors) {
        return plan::GroupSpec{.name = name, .tensors = std::move(tensors)};
      }));
  m.def("shard_intervals", &shard_intervals);
}

}  // namespace dovetail::python

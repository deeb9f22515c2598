#include <pybind11/stl.h>

#include "dovetail/checkpoint/load.h"
#include "dovetail/checkpoint/writer.h"
#include "dovetail/storage/memory.h"
#include "dovetail/storage/state_entry.h"
#include "dovetail/storage/views.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {
namespace {

using Aliases = std::vector<std::pair<std::string, std::string>>;  // alias, stored name

std::vector<TensorAlias> aliases_of(const Aliases& names) {
  std::vector<TensorAlias> out;
  for (const auto& [alias, tensor] : names) out.push_back({alias, tensor});
  return out;
}

StateEntry entry_of(const std::string& tensor, const std::string& field, std::vector<int64_t> shape, int64_t begin,
                    at::Tensor values, bool writer) {
  const auto owner = std::make_shared<at::Tensor>(std::move(values));
  return {.tensor = tensor, .field = field, .shape = std::move(shape), .dtype = dtype_of(owner->scalar_type()),
          .elements = {begin, begin + owner->numel()}, .data = static_cast<std::byte*>(owner->data_ptr()),
          .writer = writer, .owner = owner};
}

at::Tensor values_of(const StateEntry& e) {
  const int64_t n = e.elements.size();
  return tensor_in(Memory{.owner = e.owner, .data = e.data, .bytes = n * size_of(e.dtype)}, 0, {n}, e.dtype);
}

std::string save(comm::Group& world, const std::string& folder, int64_t keep, const ShardedState& state,
                 const Aliases& aliases, const TrainingState& training) {
  CheckpointWriter writer(world, {.folder = folder, .keep = keep});
  writer.begin(state, aliases_of(aliases), training);
  return writer.finish().value().path;
}

std::optional<LoadedCheckpoint> load(comm::Group& world, const std::string& path, bool newest,
                                     const ShardedState& state, const Aliases& aliases, bool weights_only) {
  LoadOptions options;
  if (weights_only) options.fields = LoadFields::weights;
  if (newest) return load_newest(path, state, aliases_of(aliases), world, options);
  return LoadedCheckpoint{path, load_checkpoint(path, state, aliases_of(aliases), world, options), {}};
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<StateEntry>(m, "StateEntry")
      .def(py::init(&entry_of))
      .def_readonly("tensor", &StateEntry::tensor)
      .def_readonly("field", &StateEntry::field)
      .def_readonly("shape", &StateEntry::shape)
      .def_property_readonly("elements", [](const StateEntry& e) {
        return std::pair(e.elements.begin, e.elements.end);
      })
      .def_readonly("per_unit", &StateEntry::per_unit)
      .def_property_readonly("values", &values_of);
  py::class_<TrainingState>(m, "TrainingState")
      .def(py::init<>())
      .def_readwrite("step", &TrainingState::step)
      .def_readwrite("optimizer", &TrainingState::optimizer)
      .def_readwrite("trainer", &TrainingState::trainer);
  py::class_<LoadedCheckpoint>(m, "LoadedCheckpoint")
      .def_readonly("path", &LoadedCheckpoint::path)
      .def_readonly("training", &LoadedCheckpoint::training)
      .def_readonly("passed_over", &LoadedCheckpoint::passed_over);
  m.def("save_checkpoint", &save, Unlocked());
  m.def("load_checkpoint", &load, Unlocked());
}

}  // namespace dovetail::python

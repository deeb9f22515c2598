#include <pybind11/stl.h>

#include "dovetail/checkpoint/load.h"
#include "dovetail/checkpoint/writer.h"
#include "dovetail/engine/engine.h"
#include "python/bindings/bindings.h"

namespace dovetail::python {

void bind_checkpoint(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("save_checkpoint", [](Engine& engine, comm::Group& world, const std::string& folder, int64_t keep) {
    CheckpointWriter writer(world, {.folder = folder, .keep = keep});
    TrainingState training;
    training.step = engine.steps_done();
    training.optimizer = engine.describe_optimizer();
    writer.begin(engine.state(), engine.aliases(), training);
    return writer.finish().value().path;
  }, Unlocked());
  m.def("load_checkpoint", [](Engine& engine, comm::Group& world, const std::string& folder, bool weights_only) {
    LoadOptions options;
    if (weights_only) options.fields = LoadFields::weights;
    const auto loaded = load_newest(folder, engine.state(), engine.aliases(), world, options);
    if (!loaded) throw FileError("no checkpoint in " + folder);
    engine.state_was_loaded();
    engine.set_steps_done(loaded->training.step);
    return loaded->path;
  }, Unlocked());
}

}  // namespace dovetail::python

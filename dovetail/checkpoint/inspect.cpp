#include "dovetail/checkpoint/inspect.h"

#include <fmt/ranges.h>

#include <map>
#include <memory>

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/folder.h"
#include "dovetail/checkpoint/reshard.h"
#include "dovetail/numerics/bf16.h"

namespace dovetail {
namespace {

std::string size_text(int64_t bytes) {
  if (bytes < 10'000) return fmt::format("{} bytes", bytes);
  return fmt::format("{} bytes ({:.1f} MiB)", bytes, static_cast<double>(bytes) / (1 << 20));
}

// Tensors in stored order with the numbers of their entries.
std::vector<std::pair<std::string, std::vector<int64_t>>> by_tensor(const Manifest& m) {
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;
  std::map<std::string, size_t> index;
  for (size_t i = 0; i < m.entries.size(); ++i) {
    const auto [place, fresh] = index.emplace(m.entries[i].tensor, tensors.size());
    if (fresh) tensors.emplace_back(m.entries[i].tensor, std::vector<int64_t>{});
    tensors[place->second].second.push_back(static_cast<int64_t>(i));
  }
  return tensors;
}

std::string tensor_line(const Manifest& m, const std::string& name,
                        const std::vector<int64_t>& entries) {
  const StoredEntry& first = m.entries[entries.front()];
  std::string line = fmt::format("  {} [{}]:", name, fmt::join(first.shape, ", "));
  for (int64_t i : entries) {
    const StoredEntry& e = m.entries[i];
    line += fmt::format(" {} {}", e.field, name_of(e.dtype));
    if (e.shape != first.shape) line += fmt::format(" [{}]", fmt::join(e.shape, ", "));
    if (i != entries.back()) line += ",";
  }
  return line + "\n";
}

// The entry's values, verified.
void read_entry(const Checkpoint& checkpoint, const StoredEntry& e, std::byte* into) {
  const StateEntry whole{.tensor = e.tensor,
                         .field = e.field,
                         .shape = e.shape,
                         .dtype = e.dtype,
                         .elements = {0, e.numel()},
                         .data = into,
                         .writer = false};
  const ReadPlan plan = plan_reads(checkpoint, {whole}, {}, LoadFields::all);
  make_reader(checkpoint, plan, into).run();
}

}  // namespace

std::string describe(const Checkpoint& checkpoint) {
  const Manifest& m = checkpoint.manifest();
  const TrainingState& t = m.training;
  std::string text = fmt::format("{}\nstep {}, written by {} ranks with degrees {}, plan {:016x}\n",
                                 checkpoint.folder(), t.step, m.world,
                                 t.degrees.empty() ? "unknown" : t.degrees, t.plan_hash);
  text += fmt::format("optimizer: {}\n", t.optimizer.empty() ? "none" : t.optimizer);
  if (!m.non_finite.empty()) text += checkpoint.non_finite_text() + "\n";

  const auto tensors = by_tensor(m);
  text += fmt::format("{} tensors\n", tensors.size());
  for (const auto& [name, entries] : tensors) text += tensor_line(m, name, entries);
  for (const TensorAlias& a : m.aliases) text += fmt::format("  {} is {}\n", a.alias, a.tensor);

  std::map<std::string, std::pair<int64_t, int64_t>> fields;  // elements, bytes
  for (const StoredEntry& e : m.entries) {
    fields[e.field].first += e.numel();
    fields[e.field].second += e.numel() * size_of(e.dtype);
  }
  text += fmt::format("{} fields\n", fields.size());
  for (const auto& [name, sums] : fields)
    text += fmt::format("  {}: {} elements, {}\n", name, sums.first, size_text(sums.second));
  text += fmt::format("{} data files, {}\n", m.files.size(), size_text(m.data_bytes()));
  for (const DataFile& f : m.files)
    text += fmt::format("  {}: {}, {} records, {} checksums\n", f.name, size_text(f.bytes),
                        f.records.size(), f.checksums.size());
  return text;
}

std::string describe_verification(const Checkpoint& checkpoint) {
  const auto faults = verify(checkpoint);
  if (faults.empty())
    return fmt::format("sound: {} of data agree with their checksums\n",
                       size_text(checkpoint.manifest().data_bytes()));
  return fmt::format("damaged:\n  {}\n", fmt::join(faults, "\n  "));
}

std::string describe_folder(const std::string& folder) {
  std::string text;
  for (const ListedCheckpoint& c : list_checkpoints(folder))
    text +=
        fmt::format("{}: {}\n", c.path, c.fault.empty() ? "complete" : "passed over: " + c.fault);
  return text.empty() ? fmt::format("{}: no checkpoint\n", folder) : text;
}

std::vector<std::string> weight_names(const Checkpoint& checkpoint) {
  std::vector<std::string> names;
  for (const StoredEntry& e : checkpoint.manifest().entries)
    if (e.field == kWeightField) names.push_back(e.tensor);
  return names;
}

WholeTensor read_weight(const Checkpoint& checkpoint, std::string_view tensor) {
  const int64_t entry = checkpoint.find(tensor, kWeightField);
  if (entry < 0) raise<ConfigError>("{}: no weight of tensor {}", checkpoint.folder(), tensor);
  const StoredEntry& e = checkpoint.manifest().entries[entry];
  WholeTensor whole{
      .name = std::string(tensor), .shape = e.shape, .data = std::vector<float>(e.numel())};
  if (e.dtype == DType::f32) {
    read_entry(checkpoint, e, reinterpret_cast<std::byte*>(whole.data.data()));
  } else if (e.dtype == DType::bf16) {
    std::vector<uint16_t> narrow(e.numel());
    read_entry(checkpoint, e, reinterpret_cast<std::byte*>(narrow.data()));
    decode_bf16(narrow, whole.data);
  } else {
    raise<ConfigError>("{}: weight of {} is {}, wanted fp32 or bf16", checkpoint.folder(), tensor,
                       name_of(e.dtype));
  }
  return whole;
}

std::vector<WholeTensor> export_weights(const Checkpoint& checkpoint) {
  std::vector<WholeTensor> list;
  for (const std::string& name : weight_names(checkpoint))
    list.push_back(read_weight(checkpoint, name));
  return list;
}

}  // namespace dovetail

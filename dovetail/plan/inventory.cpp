#include "dovetail/plan/inventory.h"

#include "dovetail/base/error.h"
#include "dovetail/plan/json_file.h"

namespace dovetail::plan {
namespace {

using nlohmann::json;

constexpr int64_t kMost = int64_t{1} << 44;  // elements of a group with its repeats

TensorSpec parse_tensor(const json& object, const std::string& path, const std::string& group) {
  TensorSpec t;
  t.name = member<std::string>(object, "name", path, group + ": a parameter");
  const std::string place = group + "." + t.name;
  const json shape = member<json>(object, "shape", path, place);
  if (!shape.is_array())
    raise<FileError>("{}: shape of {}: wanted a list; got {}", path, place, shape.dump());
  int64_t numel = 1;
  for (const json& d : shape) {
    const int64_t n = d.is_number_integer() ? d.get<int64_t>() : -1;
    if (n < 0 || (n > 0 && numel > kMost / n))
      raise<FileError>("{}: shape of {}: {} is impossible", path, place, shape.dump());
    t.shape.push_back(n);
    numel *= n;
  }
  try {
    t.kind = parse_param_kind(member<std::string>(object, "kind", path, place));
  } catch (const ConfigError& e) {
    raise<FileError>("{}: {}: {}", path, place, e.what());
  }
  t.heads = member_or<int64_t>(object, "heads", 0, path, place);
  t.heads_dim = member_or<int>(object, "heads_dim", 0, path, place);
  if (t.heads < 0 || t.heads_dim < 0 || t.heads_dim > 1)
    raise<FileError>("{}: {}: {} heads along dimension {}", path, place, t.heads, t.heads_dim);
  return t;
}

InventoryGroup parse_group(const json& object, const std::string& path) {
  InventoryGroup g;
  g.name = member<std::string>(object, "name", path, "a group");
  g.repeat = member_or<int64_t>(object, "repeat", 1, path, g.name);
  if (g.repeat < 1 || g.repeat > 1'000'000)
    raise<FileError>("{}: repeat of {}: {}", path, g.name, g.repeat);
  const json params = member<json>(object, "params", path, g.name);
  if (!params.is_array()) raise<FileError>("{}: \"params\" of {} is no list", path, g.name);
  for (const json& p : params) {
    g.tensors.push_back(parse_tensor(p, path, g.name));
    if (g.numel() > kMost / g.repeat)
      raise<FileError>("{}: {} has more than {} elements", path, g.name, kMost);
  }
  return g;
}

}  // namespace

int64_t InventoryGroup::numel() const {
  int64_t n = 0;
  for (const TensorSpec& t : tensors) n += t.numel();
  return n;
}

int64_t Inventory::numel() const {
  int64_t n = 0;
  for (const InventoryGroup& g : groups) n += g.repeat * g.numel();
  return n;
}

Inventory parse_inventory(std::string_view text, const std::string& path) {
  const json object = parse_json(text, path);
  Inventory r;
  r.name = member<std::string>(object, "name", path, "the model");
  const json groups = member<json>(object, "groups", path, "the model");
  if (!groups.is_array() || groups.empty())
    raise<FileError>("{}: \"groups\" is no list of groups", path);
  for (const json& g : groups) r.groups.push_back(parse_group(g, path));
  const int64_t stated = member_or<int64_t>(object, "numel", r.numel(), path, "the model");
  if (stated != r.numel())
    raise<FileError>("{}: numel says {} elements, the shapes add up to {}", path, stated,
                     r.numel());
  return r;
}

Inventory read_inventory(const std::string& path) {
  return parse_inventory(read_text_file(path), path);
}

}  // namespace dovetail::plan

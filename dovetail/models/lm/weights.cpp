#include "dovetail/models/lm/weights.h"

#include <cstring>
#include <fstream>
#include <set>
#include <sstream>

#include "dovetail/base/error.h"
#include "dovetail/models/common/safetensors.h"

namespace dovetail::models {
namespace {

bool is_tied_head(const LlamaForCausalLM& model, const std::string& name) {
  return model.config().tie_word_embeddings && name == "lm_head.weight";
}

// Old checkpoints store the rotary frequencies, which follow from the config.
bool is_rotary_buffer(const std::string& name) {
  return name.find("rotary_emb.inv_freq") != std::string::npos;
}

// One line for each difference between the module and the files.
std::string differences(const LlamaForCausalLM& model, const SafetensorsSet& set) {
  std::string out;
  std::set<std::string> known;
  for (const auto& item : model.named_parameters()) {
    known.insert(item.key());
    if (!set.contains(item.key())) {
      if (!is_tied_head(model, item.key())) out += "\n  missing: " + item.key();
      continue;
    }
    const auto& entry = set.entry(item.key());
    if (item.value().sizes() != at::IntArrayRef(entry.shape))
      out += fmt::format("\n  {}: wanted {}, got {}", item.key(), c10::str(item.value().sizes()),
                         c10::str(at::IntArrayRef(entry.shape)));
    if (!at::isFloatingType(entry.dtype))
      out += fmt::format("\n  {}: wanted floating point, got {}", item.key(),
                         c10::toString(entry.dtype));
  }
  for (const std::string& name : set.names())
    if (!known.count(name) && !is_rotary_buffer(name)) out += "\n  unexpected: " + name;
  return out;
}

}  // namespace

void load_weights(LlamaForCausalLM& model, const std::filesystem::path& path) {
  const SafetensorsSet set(path);
  const std::string wrong = differences(model, set);
  if (!wrong.empty()) raise<FileError>("{} does not fit the model:{}", path.string(), wrong);
  const at::NoGradGuard no_grad;
  for (const auto& item : model.named_parameters()) {
    if (item.value().is_meta())
      raise<StateError>("{} is on the meta device: materialize the model first", item.key());
    if (set.contains(item.key()) && !is_tied_head(model, item.key()))
      at::Tensor(item.value()).copy_(set.tensor(item.key()));
  }
}

void save_weights(const LlamaForCausalLM& model, const std::filesystem::path& file) {
  NamedTensors tensors;
  for (const auto& item : model.named_parameters())
    if (!is_tied_head(model, item.key())) tensors.emplace_back(item.key(), item.value());
  write_safetensors(file, tensors, {{"format", "pt"}});
}

void save_pretrained(const LlamaForCausalLM& model, const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::ofstream config(folder / "config.json", std::ios::trunc);
  config << hugging_face_config(model.config());
  config.close();
  if (!config) raise<FileError>("{}: cannot be written", (folder / "config.json").string());
  save_weights(model, folder / "model.safetensors");
}

LlamaConfig load_config(const std::filesystem::path& folder) {
  const auto path = folder / "config.json";
  std::ifstream in(path);
  if (!in) raise<FileError>("{}: cannot be opened", path.string());
  std::stringstream text;
  text << in.rdbuf();
  return parse_hugging_face_config(text.str(), path.string());
}

}  // namespace dovetail::models

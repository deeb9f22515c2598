// Writing a configuration as TOML.
#include <fmt/ranges.h>

#include "dovetail/trainer/config_fields.h"

namespace dovetail::trainer {
namespace {

using config_fields::Limits;

std::string quoted_name(const std::string& text) {
  return nlohmann::json(text).dump();
}  // TOML's escapes contain JSON's

std::string number(double value) {
  std::string text = fmt::format("{}", value);
  return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
}

class TableWriter {
 public:
  explicit TableWriter(std::string& out) : out_(out) {}
  void operator()(const char* key, int64_t value, const Limits& = {}) {
    line(key, std::to_string(value));
  }
  void operator()(const char* key, double value, const Limits& = {}) { line(key, number(value)); }
  void operator()(const char* key, bool value) { line(key, value ? "true" : "false"); }
  void operator()(const char* key, const std::string& value, const Limits& = {}) {
    line(key, quoted_name(value));
  }
  void operator()(const char* key, const std::vector<std::string>& value) {
    std::vector<std::string> items;
    for (const std::string& item : value) items.push_back(quoted_name(item));
    line(key, fmt::format("[{}]", fmt::join(items, ", ")));
  }
  void operator()(const char* key, const std::vector<ParameterRule>& value) {
    std::vector<std::string> items;
    for (const ParameterRule& rule : value) {
      std::string item = fmt::format("{{ pattern = {}, lr_scale = {}", quoted_name(rule.pattern),
                                     number(rule.lr_scale));
      if (rule.weight_decay) item += fmt::format(", weight_decay = {}", number(*rule.weight_decay));
      if (!rule.optimizer.empty()) item += ", optimizer = " + quoted_name(rule.optimizer);
      items.push_back(item + " }");
    }
    line(key, fmt::format("[{}]", fmt::join(items, ", ")));
  }

 private:
  void line(const char* key, const std::string& value) {
    out_ += fmt::format("{} = {}\n", key, value);
  }
  std::string& out_;
};

std::string toml_value(const nlohmann::json& value) {
  if (value.is_number_float()) return number(value.get<double>());
  std::vector<std::string> items;
  if (value.is_array()) {
    for (const auto& item : value) items.push_back(toml_value(item));
    return fmt::format("[{}]", fmt::join(items, ", "));
  }
  if (value.is_object()) {
    for (const auto& [key, item] : value.items())
      items.push_back(fmt::format("{} = {}", quoted_name(key), toml_value(item)));
    return fmt::format("{{ {} }}", fmt::join(items, ", "));
  }
  return value.dump();
}

}  // namespace

std::string to_toml(const Config& config) {
  std::string out = "[model]\n";
  for (const auto& [key, value] : config.model.items())
    out += fmt::format("{} = {}\n", key, toml_value(value));
  Config copy = config;
  config_fields::sections(copy, [&](const char* name, auto& section) {
    out += fmt::format("\n[{}]\n", name);
    TableWriter writer(out);
    config_fields::visit(writer, section);
  });
  return out;
}

}  // namespace dovetail::trainer

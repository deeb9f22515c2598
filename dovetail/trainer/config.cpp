#include "dovetail/trainer/config.h"

#include <fmt/ranges.h>
#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/trainer/config_fields.h"
#include "dovetail/trainer/mapped_file.h"

namespace dovetail::trainer {
namespace {

using config_fields::Limits;

std::string shown(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& n) {
    if constexpr (toml::is_table<decltype(n)>) out << "a table";
    else if constexpr (toml::is_array<decltype(n)>) out << n;
    else out << toml::node_view<const toml::node>(n);
  });
  return out.str();
}

[[noreturn]] void unknown_key(const std::string& path, std::string_view key,
                              const std::vector<std::string>& known) {
  const std::string near = nearest(key, known);
  raise<ConfigError>("config: {}: unknown key{}", path,
                     near.empty() ? "" : "; did you mean " + near + "?");
}

[[noreturn]] void wrong(const std::string& path, std::string_view wanted, std::string_view got) {
  raise<ConfigError>("config: {}: wanted {}, got {}", path, wanted, got);
}

void check_number(const std::string& path, double value, const Limits& limits,
                  const std::string& got) {
  const bool low = limits.open ? value > limits.low : value >= limits.low;
  const bool high = limits.open_above ? value < limits.high : value <= limits.high;
  if (low && high) return;
  if (limits.open_above) wrong(path, fmt::format("a number of at least {} and below {}", limits.low, limits.high), got);
  if (limits.open) wrong(path, fmt::format("a number above {}", limits.low), got);
  if (limits.high < std::numeric_limits<double>::infinity())
    wrong(path, fmt::format("a number from {} to {}", limits.low, limits.high), got);
  wrong(path, fmt::format("at least {}", limits.low), got);
}

// Reads one table; finish() refuses what nobody asked for.
class TableReader {
 public:
  TableReader(const toml::table& table, std::string path) : table_(table), path_(std::move(path)) {}

  void operator()(const char* key, int64_t& value, const Limits& limits = {}) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_integer()) wrong(full(key), "an integer", shown(*node));
    value = **node->as_integer();
    check_number(full(key), static_cast<double>(value), limits, shown(*node));
  }
  void operator()(const char* key, double& value, const Limits& limits = {}) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_number()) wrong(full(key), "a number", shown(*node));
    value = *node->value<double>();
    if (!std::isfinite(value)) wrong(full(key), "a finite number", shown(*node));
    check_number(full(key), value, limits, shown(*node));
  }
  void operator()(const char* key, bool& value) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_boolean()) wrong(full(key), "true or false", shown(*node));
    value = **node->as_boolean();
  }
  void operator()(const char* key, std::string& value, const Limits& limits = {}) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_string()) wrong(full(key), "a string", shown(*node));
    value = **node->as_string();
    const auto& words = limits.words;
    if (!words.empty() && std::find(words.begin(), words.end(), value) == words.end())
      wrong(full(key), fmt::format("one of {}", fmt::join(words, ", ")), "'" + value + "'");
  }
  void operator()(const char* key, std::vector<std::string>& value) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_array()) wrong(full(key), "a list of strings", shown(*node));
    value.clear();
    for (const toml::node& item : *node->as_array()) {
      if (!item.is_string()) wrong(full(key), "a list of strings", shown(*node));
      value.push_back(**item.as_string());
    }
  }
  void operator()(const char* key, std::vector<ParameterRule>& value) {
    const toml::node* node = find(key);
    if (!node) return;
    if (!node->is_array()) wrong(full(key), "a list of tables", shown(*node));
    value.clear();
    for (const toml::node& item : *node->as_array()) {
      if (!item.is_table()) wrong(full(key), "a list of tables", shown(*node));
      value.push_back(rule(*item.as_table(), fmt::format("{}[{}]", full(key), value.size())));
    }
  }

  void finish() const {
    for (const auto& [key, node] : table_)
      if (std::find(known_.begin(), known_.end(), key.str()) == known_.end())
        unknown_key(full(key.str()), key.str(), known_);
  }

 private:
  static ParameterRule rule(const toml::table& table, const std::string& path) {
    TableReader reader(table, path);
    ParameterRule rule;
    double decay = -1;
    reader("pattern", rule.pattern);
    reader("lr_scale", rule.lr_scale, config_fields::at_least(0));
    reader("weight_decay", decay, config_fields::at_least(0));
    reader("optimizer", rule.optimizer, config_fields::optimizer_names());
    reader.finish();
    if (rule.pattern.empty()) wrong(path + ".pattern", "a pattern of parameter names", "nothing");
    if (decay >= 0) rule.weight_decay = decay;
    return rule;
  }

  const toml::node* find(const char* key) {
    known_.emplace_back(key);
    return table_.get(key);
  }
  std::string full(std::string_view key) const { return path_ + "." + std::string(key); }

  const toml::table& table_;
  std::string path_;
  std::vector<std::string> known_;
};

toml::table parse_toml(std::string_view text, const std::string& name) {
  try {
    return toml::parse(text, name);
  } catch (const toml::parse_error& e) {
    raise<ConfigError>("config: {}:{}:{}: {}", name, e.source().begin.line, e.source().begin.column,
                       e.description());
  }
}

// The value of an override, in TOML; what is not TOML is a string.
toml::table parse_value(const std::string& value) {
  try {
    return toml::parse("value = " + value);
  } catch (const toml::parse_error&) {
    return toml::table{{"value", value}};
  }
}

void apply_override(toml::table& root, const std::string& assignment) {
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0)
    raise<ConfigError>("--set: wanted KEY.PATH=VALUE, got '{}'", assignment);
  toml::table* table = &root;
  std::string path = assignment.substr(0, equals);
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.')) {
    const std::string part = path.substr(0, dot);
    auto [entry, added] = table->insert(part, toml::table{});
    if (!entry->second.is_table())
      raise<ConfigError>("--set: {}: {} is not a table", assignment, part);
    table = entry->second.as_table();
    path.erase(0, dot + 1);
  }
  const toml::table parsed = parse_value(assignment.substr(equals + 1));
  parsed.get("value")->visit([&](const auto& node) { table->insert_or_assign(path, node); });
}

nlohmann::json to_json(const toml::node& node, const std::string& path) {
  if (const auto* v = node.as_integer()) return v->get();
  if (const auto* v = node.as_floating_point()) return v->get();
  if (const auto* v = node.as_boolean()) return v->get();
  if (const auto* v = node.as_string()) return v->get();
  if (const auto* v = node.as_array()) {
    auto list = nlohmann::json::array();
    for (const toml::node& item : *v) list.push_back(to_json(item, path));
    return list;
  }
  if (const auto* v = node.as_table()) {
    auto object = nlohmann::json::object();
    for (const auto& [key, item] : *v)
      object[std::string(key.str())] = to_json(item, path + "." + std::string(key.str()));
    return object;
  }
  wrong(path, "a number, string, truth value, list or table", shown(node));
}

const toml::table& section_table(const toml::table& root, const char* name) {
  static const toml::table kEmpty;
  const toml::node* node = root.get(name);
  if (!node) return kEmpty;
  if (!node->is_table()) wrong(name, "a table", shown(*node));
  return *node->as_table();
}

void check_together(const Config& c) {
  if (c.data.sources.empty())
    wrong("data.sources", "at least one file, folder or \"python-stdlib\"", "none");
  if (c.run.name.empty()) wrong("run.name", "a name", "''");
  if (c.optimizer.warmup_steps > c.train.steps)
    wrong("optimizer.warmup_steps", fmt::format("at most train.steps = {}", c.train.steps),
          std::to_string(c.optimizer.warmup_steps));
  if (c.optimizer.schedule != "constant" && c.optimizer.warmup_steps == c.train.steps)
    wrong("optimizer.warmup_steps",
          fmt::format("fewer than train.steps = {} with schedule {}", c.train.steps, c.optimizer.schedule),
          std::to_string(c.optimizer.warmup_steps));
  if (c.optimizer.nesterov && (c.optimizer.momentum == 0 || c.optimizer.dampening != 0))
    wrong("optimizer.nesterov", "optimizer.momentum above 0 and optimizer.dampening 0 with it",
          fmt::format("{} and {}", c.optimizer.momentum, c.optimizer.dampening));
  if (c.optimizer.lr_floor > c.optimizer.lr)
    wrong("optimizer.lr_floor", fmt::format("at most optimizer.lr = {}", c.optimizer.lr),
          fmt::format("{}", c.optimizer.lr_floor));
  if (c.sample.tokens > 0 && c.sample.prompt.empty())
    wrong("sample.prompt", "at least one character", "''");
  if (c.train.micro_batch > c.train.batch)
    wrong("train.micro_batch", fmt::format("at most train.batch = {}", c.train.batch),
          std::to_string(c.train.micro_batch));
}

}  // namespace

Config parse_config(std::string_view text, const std::string& file_name,
                    const std::vector<std::string>& overrides) {
  toml::table root = parse_toml(text, file_name);
  for (const std::string& assignment : overrides) apply_override(root, assignment);
  Config config;
  std::vector<std::string> known{"model"};
  config_fields::sections(config, [&](const char* name, auto& section) {
    known.emplace_back(name);
    TableReader reader(section_table(root, name), name);
    config_fields::visit(reader, section);
    reader.finish();
  });
  for (const auto& [key, node] : root)
    if (std::find(known.begin(), known.end(), key.str()) == known.end())
      unknown_key(std::string(key.str()), key.str(), known);
  config.model = to_json(section_table(root, "model"), "model");
  check_together(config);
  return config;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_config(read_text_file(path), path, overrides);
}

std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  std::string best;
  size_t best_distance = word.size() / 3 + 2;
  for (const std::string& candidate : known) {
    std::vector<size_t> row(candidate.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 0; i < word.size(); ++i) {
      size_t diagonal = std::exchange(row[0], i + 1);
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t changed = diagonal + (word[i] != candidate[j]);
        diagonal = row[j + 1];
        row[j + 1] = std::min({changed, diagonal + 1, row[j] + 1});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

}  // namespace dovetail::trainer

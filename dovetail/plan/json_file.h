// JSON files from users: every fault becomes one FileError that names the file and the place in it.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

#include "dovetail/base/error.h"

namespace dovetail::plan {

std::string read_text_file(const std::string& path);  // throws FileError
nlohmann::json parse_json(std::string_view text, const std::string& path);

// The member `key` of the object at `place`, of type T (numbers must be whole for integers).
template <class T>
T member(const nlohmann::json& object, const char* key, const std::string& path,
         std::string_view place) {
  if (!object.is_object() || !object.contains(key))
    raise<FileError>("{}: {} has no \"{}\"", path, place, key);
  const nlohmann::json& value = object.at(key);
  const bool whole = !std::is_integral_v<T> || std::is_same_v<T, bool> || value.is_number_integer();
  try {
    if (whole) return value.get<T>();
  } catch (const nlohmann::json::exception&) {
  }
  raise<FileError>("{}: \"{}\" of {} has the wrong type: {}", path, key, place,
                   value.dump().substr(0, 60));
}

template <class T>
T member_or(const nlohmann::json& object, const char* key, T otherwise, const std::string& path,
            std::string_view place) {
  if (!object.contains(key) || object.at(key).is_null()) return otherwise;
  return member<T>(object, key, path, place);
}

}  // namespace dovetail::plan

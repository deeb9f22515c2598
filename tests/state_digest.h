// The whole state of a job as its ranks hold it, for comparisons.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "dovetail/base/hash.h"
#include "dovetail/comm/group.h"
#include "dovetail/storage/state_entry.h"

namespace dovetail::testing {

// "tensor field" -> size in bytes and hash of all its values, put together from what the ranks
// write. Collective.
inline std::map<std::string, std::pair<size_t, uint64_t>> state_digest(const ShardedState& state,
                                                                      comm::Group& world) {
  std::vector<std::byte> mine;
  auto put = [&](const void* data, int64_t n) {
    const auto* bytes = static_cast<const std::byte*>(data);
    mine.insert(mine.end(), bytes, bytes + n);
  };
  for (const StateEntry& e : state) {
    if (!e.writer || e.elements.empty()) continue;
    const std::string name = e.tensor + " " + e.field;
    const int64_t header[3] = {std::ssize(name), e.elements.begin,
                               e.elements.size() * size_of(e.dtype)};
    put(header, sizeof header);
    put(name.data(), header[0]);
    put(e.data, header[2]);
  }
  std::map<std::string, std::map<int64_t, std::string>> parts;
  for (const auto& bytes : world.gather_bytes(mine, {.label = "state digest"}))
    for (size_t at = 0; at < bytes.size();) {
      int64_t header[3];
      std::memcpy(header, bytes.data() + at, sizeof header);
      const auto* text = reinterpret_cast<const char*>(bytes.data()) + at + sizeof header;
      parts[std::string(text, header[0])][header[1]] = std::string(text + header[0], header[2]);
      at += sizeof header + header[0] + header[2];
    }
  std::map<std::string, std::pair<size_t, uint64_t>> digest;
  for (const auto& [name, runs] : parts) {
    std::string all;
    for (const auto& [begin, run] : runs) all += run;
    digest[name] = {all.size(), hash64(all)};
  }
  return digest;
}

}  // namespace dovetail::testing

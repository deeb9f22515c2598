#include "dovetail/checkpoint/snapshot.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "dovetail/base/error.h"
#include "dovetail/numerics/vector_clones.h"

namespace dovetail {
namespace {

constexpr int64_t kBlockBytes = 256 << 10;  // scanned, then copied while in cache

DT_VECTOR_CLONES bool all_finite(const uint32_t* bits, int64_t n) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (bits[i] & 0x7f800000u) == 0x7f800000u;
  return bad == 0;
}

DT_VECTOR_CLONES bool all_finite(const uint16_t* bits, int64_t n) {
  uint16_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= (bits[i] & 0x7f80u) == 0x7f80u;
  return bad == 0;
}

template <class T>
int64_t first_bad(const T* bits, int64_t n, T exponent) {
  if (all_finite(bits, n)) return -1;
  return std::find_if(bits, bits + n, [&](T b) { return (b & exponent) == exponent; }) - bits;
}

int64_t first_bad(DType dtype, const std::byte* data, int64_t bytes) {
  if (dtype == DType::f32)
    return first_bad<uint32_t>(reinterpret_cast<const uint32_t*>(data), bytes / 4, 0x7f800000u);
  if (dtype == DType::bf16)
    return first_bad<uint16_t>(reinterpret_cast<const uint16_t*>(data), bytes / 2, 0x7f80u);
  return -1;
}

// Copies and returns the index of the first value that is not finite, -1 if none.
int64_t copy_scanned(const StateEntry& entry, std::byte* to) {
  const int64_t width = size_of(entry.dtype), bytes = entry.elements.size() * width;
  int64_t found = -1;
  for (int64_t at = 0; at < bytes; at += kBlockBytes) {
    const int64_t n = std::min(kBlockBytes, bytes - at);
    if (found < 0) {
      const int64_t i = first_bad(entry.dtype, entry.data + at, n);
      if (i >= 0) found = at / width + i;
    }
    std::memcpy(to + at, entry.data + at, n);
  }
  return found;
}

StoredEntry stored(const StateEntry& e) {
  return {.tensor = e.tensor, .field = e.field, .shape = e.shape, .dtype = e.dtype};
}

using EntryIndex = std::map<std::pair<std::string, std::string>, int64_t>;

EntryIndex number_entries(const ShardedState& state, std::vector<StoredEntry>* schema) {
  EntryIndex index;
  for (const StateEntry& e : state) {
    const auto [place, fresh] =
        index.emplace(std::pair(e.tensor, e.field), static_cast<int64_t>(index.size()));
    if (fresh && schema) schema->push_back(stored(e));
  }
  return index;
}

}  // namespace

std::vector<StoredEntry> schema_of(const ShardedState& state) {
  std::vector<StoredEntry> schema;
  const EntryIndex index = number_entries(state, &schema);
  for (const StateEntry& e : state) {
    const StoredEntry& first = schema[index.at({e.tensor, e.field})];
    if (first != stored(e))
      raise<ConfigError>("state: {} appears with two shapes or dtypes", first.name());
    if (!Interval{0, first.numel()}.contains(e.elements))
      raise<ConfigError>("state: {} has {} elements, this rank claims [{}, {})", first.name(),
                         first.numel(), e.elements.begin, e.elements.end);
    if (!e.elements.empty() && e.data == nullptr)
      raise<ConfigError>("state: {} has no memory", first.name());
  }
  return schema;
}

Snapshot take_snapshot(const ShardedState& state) {
  const EntryIndex index = number_entries(state, nullptr);
  Snapshot s;
  int64_t bytes = 0;
  for (const StateEntry& e : state) {
    if (!e.writer || e.elements.empty()) continue;
    s.records.push_back(
        {.entry = index.at({e.tensor, e.field}), .elements = e.elements, .offset = bytes});
    bytes += e.elements.size() * size_of(e.dtype);
  }
  s.data = PageBuffer(bytes);
  size_t next = 0;
  for (const StateEntry& e : state) {
    if (!e.writer || e.elements.empty()) continue;
    const Record& r = s.records[next++];
    const int64_t found = copy_scanned(e, s.data.data() + r.offset);
    if (found >= 0) s.non_finite.push_back({.entry = r.entry, .element = e.elements.begin + found});
  }
  return s;
}

}  // namespace dovetail

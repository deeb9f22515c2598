#include "dovetail/checkpoint/reshard.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <tuple>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

bool wanted(std::string_view field, LoadFields fields) {
  return fields == LoadFields::all || field == kWeightField || field == kBufferField;
}

// Finds a model's tensor in the checkpoint under any name that the model has for it.
class NameFinder {
 public:
  NameFinder(const Checkpoint& checkpoint, const std::vector<TensorAlias>& aliases)
      : checkpoint_(checkpoint) {
    for (const TensorAlias& a : aliases) aliases_.emplace(a.tensor, a.alias);
  }

  int64_t find(const std::string& tensor, const std::string& field) const {
    int64_t entry = checkpoint_.find(tensor, field);
    const auto [begin, end] = aliases_.equal_range(tensor);
    for (auto a = begin; entry < 0 && a != end; ++a) entry = checkpoint_.find(a->second, field);
    return entry;
  }

 private:
  const Checkpoint& checkpoint_;
  std::multimap<std::string, std::string> aliases_;
};

std::string fields_of(const Manifest& manifest, const std::string& tensor) {
  std::string fields;
  for (const StoredEntry& e : manifest.entries)
    if (e.tensor == tensor) fields += (fields.empty() ? "" : ", ") + e.field;
  return fields;
}

class Differences {
 public:
  void add(std::string text) {
    if (count_++ == 0) first_ = std::move(text);
  }
  void throw_if_any(const std::string& folder) const {
    if (count_ > 0)
      raise<ConfigError>("{}: {}{}", folder, first_,
                         count_ > 1 ? fmt::format(" (and {} more differences)", count_ - 1) : "");
  }

 private:
  std::string first_;
  int64_t count_ = 0;
};

std::string difference(const Checkpoint& checkpoint, const StateEntry& e, int64_t found) {
  const Manifest& m = checkpoint.manifest();
  if (found < 0) {
    const std::string fields = fields_of(m, checkpoint.stored_name(e.tensor));
    return fields.empty()
               ? fmt::format("tensor {} is wanted, the checkpoint does not have it", e.tensor)
               : fmt::format("tensor {}: field {} is wanted, the checkpoint has {}", e.tensor,
                             e.field, fields);
  }
  const StoredEntry& s = m.entries[found];
  if (s.shape != e.shape)
    return fmt::format("tensor {} ({}): shape [{}] wanted, the checkpoint has [{}]", e.tensor,
                       e.field, fmt::join(e.shape, ", "), fmt::join(s.shape, ", "));
  if (s.dtype != e.dtype)
    return fmt::format("tensor {} ({}): dtype {} wanted, the checkpoint has {}", e.tensor, e.field,
                       name_of(e.dtype), name_of(s.dtype));
  return {};
}

// Copies the parts of a chunk that belong to pieces. Chunks come in order, so pieces are passed
// once.
class Stager {
 public:
  Stager(const ReadPlan& plan, int64_t chunk_bytes, std::byte* staging)
      : plan_(plan), chunk_bytes_(chunk_bytes), staging_(staging) {}

  void operator()(ChunkRef ref, std::span<const std::byte> bytes) {
    const int64_t begin = ref.chunk * chunk_bytes_;
    const Interval chunk{begin, begin + static_cast<int64_t>(bytes.size())};
    const auto& pieces = plan_.pieces;
    // Pieces of two state entries may read the same bytes (a tensor tied then and not now): all
    // that are not past count.
    while (first_ < pieces.size() && passed(pieces[first_], ref.file, chunk)) ++first_;
    for (size_t i = first_;
         i < pieces.size() && pieces[i].file == ref.file && pieces[i].bytes.begin < chunk.end;
         ++i) {
      const Interval part = intersect(pieces[i].bytes, chunk);
      if (part.empty()) continue;
      std::memcpy(staging_ + pieces[i].target + (part.begin - pieces[i].bytes.begin),
                  bytes.data() + (part.begin - begin), part.size());
    }
  }

 private:
  static bool passed(const ReadPiece& piece, int64_t file, Interval chunk) {
    return piece.file < file || (piece.file == file && piece.bytes.end <= chunk.begin);
  }

  const ReadPlan& plan_;
  const int64_t chunk_bytes_;
  std::byte* const staging_;
  size_t first_ = 0;
};

}  // namespace

void check_matches(const Checkpoint& checkpoint, const ShardedState& state,
                   const std::vector<TensorAlias>& aliases, LoadFields fields) {
  const NameFinder finder(checkpoint, aliases);
  const Manifest& manifest = checkpoint.manifest();
  Differences differences;
  std::set<int64_t> used;
  std::set<std::string> tensors;
  for (const StateEntry& e : state) {
    if (!wanted(e.field, fields)) continue;
    const int64_t found = finder.find(e.tensor, e.field);
    if (std::string text = difference(checkpoint, e, found); !text.empty())
      differences.add(std::move(text));
    if (found < 0) continue;
    used.insert(found);
    tensors.insert(manifest.entries[found].tensor);
  }
  for (size_t i = 0; i < manifest.entries.size(); ++i) {
    const StoredEntry& s = manifest.entries[i];
    if (used.contains(static_cast<int64_t>(i)) || !wanted(s.field, fields)) continue;
    differences.add(tensors.contains(s.tensor)
                        ? fmt::format("tensor {}: the checkpoint has field {}, which is not wanted",
                                      s.tensor, s.field)
                        : fmt::format("the checkpoint has tensor {} ({}), which is not wanted",
                                      s.tensor, s.field));
  }
  differences.throw_if_any(checkpoint.folder());
}

ReadPlan plan_reads(const Checkpoint& checkpoint, const ShardedState& state,
                    const std::vector<TensorAlias>& aliases, LoadFields fields) {
  const NameFinder finder(checkpoint, aliases);
  ReadPlan plan;
  for (size_t i = 0; i < state.size(); ++i) {
    const StateEntry& e = state[i];
    if (e.elements.empty() || !wanted(e.field, fields)) continue;
    const int64_t entry = finder.find(e.tensor, e.field), width = size_of(e.dtype);
    const auto runs = checkpoint.runs(entry);
    auto run = std::ranges::upper_bound(runs, e.elements.begin, {},
                                        [](const StoredRun& r) { return r.elements.end; });
    for (; run != runs.end() && run->elements.begin < e.elements.end; ++run) {
      const Interval part = intersect(run->elements, e.elements);
      const int64_t begin = run->offset + (part.begin - run->elements.begin) * width;
      plan.pieces.push_back(
          {.file = run->file,
           .bytes = {begin, begin + part.size() * width},
           .target = plan.staging_bytes + (part.begin - e.elements.begin) * width});
    }
    const int64_t bytes = e.elements.size() * width;
    plan.staged.push_back(
        {.entry = static_cast<int64_t>(i), .offset = plan.staging_bytes, .bytes = bytes});
    plan.staging_bytes += bytes;
  }
  std::ranges::sort(plan.pieces, {},
                    [](const ReadPiece& p) { return std::tuple(p.file, p.bytes.begin, p.target); });
  return plan;
}

std::vector<ChunkRef> chunks_of(const Checkpoint& checkpoint,
                                const std::vector<ReadPiece>& pieces) {
  const int64_t chunk_bytes = checkpoint.manifest().chunk_bytes;
  std::vector<ChunkRef> chunks;
  for (const ReadPiece& p : pieces)
    for (int64_t c = p.bytes.begin / chunk_bytes; c * chunk_bytes < p.bytes.end; ++c) {
      const ChunkRef ref{.file = p.file, .chunk = c};
      if (chunks.empty() || chunks.back() < ref) chunks.push_back(ref);
    }
  return chunks;
}

ChunkReader make_reader(const Checkpoint& checkpoint, const ReadPlan& plan, std::byte* staging) {
  return ChunkReader(checkpoint, chunks_of(checkpoint, plan.pieces),
                     Stager(plan, checkpoint.manifest().chunk_bytes, staging));
}

}  // namespace dovetail

#include "dovetail/checkpoint/reader.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/base/math.h"
#include "dovetail/checkpoint/folder.h"
#include "dovetail/checkpoint/vote.h"

namespace dovetail {
namespace {

void check_step(const std::string& folder, const Manifest& manifest) {
  const auto name = parse_checkpoint_name(std::filesystem::path(folder).filename().string());
  if (name && name->step != manifest.training.step)
    raise<FileError>("{}/{}: wanted step {}, got {}", folder, kManifestName, name->step,
                     manifest.training.step);
}

void check_sizes(const Checkpoint& checkpoint) {
  const auto& files = checkpoint.manifest().files;
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string path = checkpoint.path_of(static_cast<int64_t>(i));
    const int64_t bytes = InputFile(path).size();
    if (bytes != files[i].bytes)
      raise<FileError>("{}: wanted {} bytes, got {}", path, files[i].bytes, bytes);
  }
}

std::string read_manifest(const std::string& folder) {
  return read_text(fmt::format("{}/{}", folder, kManifestName));
}

}  // namespace

Checkpoint::Checkpoint(std::string folder) : folder_(std::move(folder)) {
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
  const std::string text = read_manifest(folder_);
  manifest_hash_ = hash64(text);
  manifest_ = parse_manifest(text, fmt::format("{}/{}", folder_, kManifestName));
  check_step(folder_, manifest_);
  check_sizes(*this);
  for (size_t i = 0; i < manifest_.entries.size(); ++i)
    index_.emplace(std::pair(manifest_.entries[i].tensor, manifest_.entries[i].field),
                   static_cast<int64_t>(i));
  for (const TensorAlias& a : manifest_.aliases) aliases_.emplace(a.alias, a.tensor);
  runs_.resize(manifest_.entries.size());
  for (size_t f = 0; f < manifest_.files.size(); ++f)
    for (const Record& r : manifest_.files[f].records)
      runs_[r.entry].push_back(
          {.elements = r.elements, .file = static_cast<int64_t>(f), .offset = r.offset});
  for (auto& runs : runs_) std::ranges::sort(runs, {}, &StoredRun::elements);
}

std::string Checkpoint::path_of(int64_t file) const {
  return folder_ + "/" + manifest_.files.at(file).name;
}

std::string Checkpoint::stored_name(std::string_view tensor) const {
  const auto alias = aliases_.find(tensor);
  return alias == aliases_.end() ? std::string(tensor) : alias->second;
}

int64_t Checkpoint::find(std::string_view tensor, std::string_view field) const {
  const auto found = index_.find(std::pair(stored_name(tensor), std::string(field)));
  return found == index_.end() ? -1 : found->second;
}

std::string Checkpoint::contents_of(int64_t file, Interval bytes) const {
  std::string names;
  int64_t count = 0;
  for (const Record& r : manifest_.files.at(file).records) {
    const StoredEntry& e = manifest_.entries[r.entry];
    if (intersect(bytes, Interval{r.offset, r.offset + r.elements.size() * size_of(e.dtype)})
            .empty())
      continue;
    if (++count <= 3) names += (count > 1 ? ", " : "") + e.name();
  }
  return count > 3 ? fmt::format("{} and {} more", names, count - 3) : names;
}

std::string Checkpoint::non_finite_text() const {
  if (manifest_.non_finite.empty()) return {};
  const NonFinite& first = manifest_.non_finite.front();
  return fmt::format("{}: marked as holding values that are not finite: {} element {}{}", folder_,
                     manifest_.entries[first.entry].name(), first.element,
                     manifest_.non_finite.size() > 1 ? " and more" : "");
}

std::vector<ChunkRef> all_chunks(const Checkpoint& checkpoint) {
  std::vector<ChunkRef> chunks;
  const auto& files = checkpoint.manifest().files;
  for (size_t f = 0; f < files.size(); ++f)
    for (size_t c = 0; c < files[f].checksums.size(); ++c)
      chunks.push_back({.file = static_cast<int64_t>(f), .chunk = static_cast<int64_t>(c)});
  return chunks;
}

ChunkReader::ChunkReader(const Checkpoint& checkpoint, std::vector<ChunkRef> chunks, Use use)
    : checkpoint_(checkpoint), chunks_(std::move(chunks)), use_(std::move(use)) {}

bool ChunkReader::run_until(std::chrono::steady_clock::time_point time) {
  while (next_ < chunks_.size()) {
    read_next();
    if (std::chrono::steady_clock::now() >= time) break;
  }
  return next_ == chunks_.size();
}

void ChunkReader::run() {
  while (next_ < chunks_.size()) read_next();
}

void ChunkReader::read_next() {
  const ChunkRef ref = chunks_[next_++];
  const Manifest& manifest = checkpoint_.manifest();
  const DataFile& data = manifest.files.at(ref.file);
  const std::string path = checkpoint_.path_of(ref.file);
  if (open_ != ref.file) {
    file_ = std::make_unique<InputFile>(path);
    open_ = ref.file;
  }
  if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(manifest.chunk_bytes);
  const Interval bytes{ref.chunk * manifest.chunk_bytes,
                       std::min((ref.chunk + 1) * manifest.chunk_bytes, data.bytes)};
  const std::span<std::byte> span(buffer_.get(), bytes.size());
  file_->read(bytes.begin, span);
  const uint64_t wanted = data.checksums[ref.chunk], got = hash64(span);
  if (wanted != got)
    raise<FileError>(
        "{}: bytes [{}, {}) are damaged: checksum {:016x} wanted, {:016x} got; they hold {}", path,
        bytes.begin, bytes.end, wanted, got, checkpoint_.contents_of(ref.file, bytes));
  use_(ref, span);
}

std::vector<std::string> verify(const Checkpoint& checkpoint) {
  std::vector<std::string> faults;
  ChunkReader reader(checkpoint, all_chunks(checkpoint),
                     [](ChunkRef, std::span<const std::byte>) {});
  for (;;) {
    try {
      reader.run();
      return faults;
    } catch (const FileError& e) {
      faults.push_back(e.what());  // the reader has passed the chunk; go on with the next
    }
  }
}

Checkpoint open_checkpoint(const std::string& folder, comm::Group& world) {
  std::optional<Checkpoint> checkpoint;
  const Ballot mine = attempt([&] {
    checkpoint.emplace(folder);
    return fmt::format("{:016x}", checkpoint->manifest_hash());
  });
  const auto ballots = vote(world, mine, 0, "open checkpoint");
  throw_if_failed(ballots, world, "checkpoint refused");
  for (size_t i = 1; i < ballots.size(); ++i)
    if (ballots[i].text != ballots[0].text)
      raise<FileError>("{}/{}: ranks {} and {} see different contents", folder, kManifestName,
                       world.global_ranks()[0], world.global_ranks()[i]);
  return std::move(*checkpoint);
}

void run_voting(ChunkReader& reader, comm::Group& world, int64_t step, std::string_view what) {
  for (;;) {
    bool ended = false;
    Ballot mine = attempt([&] {
      ended = reader.run_until(std::chrono::steady_clock::now() + work_slice(world));
      return std::string();
    });
    if (!mine.failed() && !ended) mine.says = Ballot::Says::running;
    const auto ballots = vote(world, mine, step, "read checkpoint");
    throw_if_failed(ballots, world, what);
    if (!any_running(ballots)) return;
  }
}

void verify(const Checkpoint& checkpoint, comm::Group& world) {
  std::vector<ChunkRef> share;
  const auto chunks = all_chunks(checkpoint);
  const size_t size = world.size(), rank = world.rank(), n = chunks.size();
  for (size_t i = n * rank / size; i < n * (rank + 1) / size; ++i) share.push_back(chunks[i]);
  ChunkReader reader(checkpoint, share, [](ChunkRef, std::span<const std::byte>) {});
  run_voting(reader, world, checkpoint.manifest().training.step, "checkpoint refused");
}

}  // namespace dovetail

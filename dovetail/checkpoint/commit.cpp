#include "dovetail/checkpoint/commit.h"

#include "dovetail/base/error.h"
#include "dovetail/checkpoint/folder.h"

namespace dovetail {
namespace {

void write_manifest(FileSystem& files, const std::string& path, const std::string& text) {
  const auto file = files.create(path);
  file->write(std::as_bytes(std::span(text)));
  file->finish();
}

std::string clean_up(FileSystem& files, const CommitRequest& request) {
  if (request.keep == 0) return {};
  try {
    for (const std::string& path :
         superfluous(request.folder, *parse_checkpoint_name(request.name), request.keep))
      remove_checkpoint(files, path);
    return {};
  } catch (const FileError& e) {
    return e.what();
  }
}

}  // namespace

std::string writing_path(const std::string& folder, const std::string& name) {
  return fmt::format("{}/{}{}", folder, kWritingPrefix, name);
}

std::string commit(FileSystem& files, CommitRequest request) {
  const std::string writing = writing_path(request.folder, request.name);
  for (const std::string& text : request.shares) {
    RankShare share = parse_share(text);
    auto& marks = request.manifest.non_finite;
    marks.insert(marks.end(), share.non_finite.begin(), share.non_finite.end());
    if (share.file.name.empty()) continue;
    const std::string path = writing + "/" + share.file.name;
    const int64_t bytes = InputFile(path).size();
    if (bytes != share.file.bytes)
      raise<FileError>("{}: wanted {} bytes, got {}", path, share.file.bytes, bytes);
    request.manifest.files.push_back(std::move(share.file));
  }
  const std::string manifest = fmt::format("{}/{}", writing, kManifestName);
  validate(request.manifest, manifest);
  write_manifest(files, manifest, to_text(request.manifest));
  files.sync_folder(writing);
  files.rename(writing, request.folder + "/" + request.name);
  files.sync_folder(request.folder);
  return clean_up(files, request);
}

}  // namespace dovetail

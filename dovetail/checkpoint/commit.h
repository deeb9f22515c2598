// The last step of writing, taken by rank 0: from a folder of data files to a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "dovetail/checkpoint/file.h"
#include "dovetail/checkpoint/manifest.h"

namespace dovetail {

struct CommitRequest {
  std::string folder;               // of checkpoints
  std::string name;                 // "step-00000020"
  Manifest manifest;                // without files and non_finite
  std::vector<std::string> shares;  // RankShare texts, in rank order
  int64_t keep = 0;                 // as WriterOptions
};

// Path while it is being written.
std::string writing_path(const std::string& folder, const std::string& name);

// Checks that the files are there and hold everything once, writes the manifest, renames, removes
// older checkpoints. Throws FileError as long as the checkpoint is not complete; afterwards returns
// why cleaning up failed, if it did.
std::string commit(FileSystem& files, CommitRequest request);

}  // namespace dovetail

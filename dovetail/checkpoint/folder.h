// Names in a folder of checkpoints: what is complete, what is a leftover, what may go.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/checkpoint/file.h"

namespace dovetail {

// step-00000020 is {20, 1}, step-00000020-2 is {20, 2}.
struct CheckpointName {
  int64_t step = 0;
  int64_t save = 1;  // the how-manieth of its step
  auto operator<=>(const CheckpointName&) const = default;
};
std::string to_text(const CheckpointName& name);
std::optional<CheckpointName> parse_checkpoint_name(std::string_view text);

inline constexpr std::string_view kWritingPrefix = ".writing-";
inline constexpr std::string_view kRemovingPrefix = ".removing-";

struct ListedCheckpoint {
  std::string path;
  CheckpointName name;
  std::string fault;    // why it is passed over; empty where nothing speaks against it
  bool broken = false;  // fault of the folder itself: unfinished, damaged
};

// Checkpoints and unfinished ones in a folder, newest first. Looks at manifests and at files'
// presence and sizes, not at their bytes. A folder that does not exist holds none; one that cannot
// be read is a FileError.
std::vector<ListedCheckpoint> list_checkpoints(const std::string& folder);

// The first name of the step that nothing in the folder has.
CheckpointName free_name(const std::string& folder, int64_t step);

// Paths that have become superfluous now that `newest` is complete: earlier saves of its step, and
// of the earlier steps all but the last `keep - 1` complete ones. Later steps, and folders that are
// broken, stay. keep >= 1.
std::vector<std::string> superfluous(const std::string& folder, const CheckpointName& newest,
                                     int64_t keep);

// Removes a checkpoint so that it is never seen half there.
void remove_checkpoint(FileSystem& files, const std::string& path);

// Removes what broken-off runs left; returns the paths. No other run may be writing to the folder.
std::vector<std::string> remove_leftovers(FileSystem& files, const std::string& folder);

}  // namespace dovetail

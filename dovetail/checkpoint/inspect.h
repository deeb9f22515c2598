// Looking at a checkpoint without any rank: text for people, and whole weights for converters.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dovetail/checkpoint/reader.h"

namespace dovetail {

// Step, origin, tensors with fields, shapes and dtypes, bytes per field and file.
std::string describe(const Checkpoint& checkpoint);
// Reads every byte and says "sound", or what is damaged.
std::string describe_verification(const Checkpoint& checkpoint);
// One line per checkpoint of the folder, newest first, with the reason why one would be passed
// over.
std::string describe_folder(const std::string& folder);

// A tensor as a converter wants it: row-major, fp32 (bf16 is widened, exactly).
struct WholeTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<float> data;
};

// Names of the tensors that have a weight, in stored order; aliases are in manifest().aliases.
std::vector<std::string> weight_names(const Checkpoint& checkpoint);
// One weight, by stored name or alias; verified. Memory: the tensor. FileError for damage,
// ConfigError for a name that is not there.
WholeTensor read_weight(const Checkpoint& checkpoint, std::string_view tensor);
// All of them.
std::vector<WholeTensor> export_weights(const Checkpoint& checkpoint);

}  // namespace dovetail

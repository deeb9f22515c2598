// A file's bytes, read-only: mapped when large, read when small.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace dovetail::trainer {

// The bytes live as long as the pointer. Throws FileError naming the file and the reason.
std::shared_ptr<const std::span<const std::byte>> map_file(const std::string& path);

// The whole file as text. Throws FileError.
std::string read_text_file(const std::string& path);

}  // namespace dovetail::trainer

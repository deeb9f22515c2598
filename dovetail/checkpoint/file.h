// Files and folders as the checkpoint uses them. Every failure is a FileError that names the path
// and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace dovetail {

// A new file, written from its start to its end. Destroying it without finish() leaves whatever was
// written.
class OutputFile {
 public:
  virtual ~OutputFile() = default;
  virtual void write(std::span<const std::byte> bytes) = 0;
  virtual void finish() = 0;  // returns when the bytes are on the device; closes
};

// What the writer changes on disk. Used by several threads at a time. Tests put their own in place
// of the disk.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual void create_folder(
      const std::string& path) = 0;  // with its parents; one that exists is fine
  virtual std::unique_ptr<OutputFile> create(const std::string& path) = 0;  // must not exist yet
  virtual void rename(const std::string& from,
                      const std::string& to) = 0;           // atomic; `to` must not exist
  virtual void sync_folder(const std::string& path) = 0;    // names in it survive a loss of power
  virtual void remove_folder(const std::string& path) = 0;  // with all that is in it
};

// The real one.
std::shared_ptr<FileSystem> make_disk();

// A file opened for reading; closes when destroyed.
class InputFile {
 public:
  explicit InputFile(std::string path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  // Fills `into` from byte `offset` on; a file that ends before is an error.
  void read(int64_t offset, std::span<std::byte> into) const;
  int64_t size() const;

 private:
  std::string path_;
  int descriptor_;
};

std::string read_text(const std::string& path);

}  // namespace dovetail

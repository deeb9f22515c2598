#include "dovetail/checkpoint/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "dovetail/base/error.h"

namespace dovetail {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, std::string_view action, int error) {
  raise<FileError>("{}: cannot {}: {}", path, action, std::generic_category().message(error));
}

class DiskFile final : public OutputFile {
 public:
  explicit DiskFile(std::string path) : path_(std::move(path)) {
    descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0) fail(path_, "create", errno);
  }
  ~DiskFile() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void write(std::span<const std::byte> bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(descriptor_, bytes.data(), bytes.size(), offset_);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(path_, fmt::format("write at byte {}", offset_), errno);
      offset_ += n;
      bytes = bytes.subspan(n);
    }
    start_writeback();
  }

  void finish() override {
    if (::fsync(descriptor_) != 0) fail(path_, "sync", errno);
    const int descriptor = std::exchange(descriptor_, -1);
    if (::close(descriptor) != 0) fail(path_, "close", errno);
  }

 private:
  // Lets the device begin before finish(), so that a large file does not pile up in memory. Only a
  // hint.
  void start_writeback() {
    constexpr int64_t kStride = int64_t{32} << 20;
    if (offset_ - started_ < kStride) return;
    ::sync_file_range(descriptor_, started_, offset_ - started_, SYNC_FILE_RANGE_WRITE);
    started_ = offset_;
  }

  const std::string path_;
  int descriptor_ = -1;
  int64_t offset_ = 0, started_ = 0;
};

class Disk final : public FileSystem {
 public:
  void create_folder(const std::string& path) override {
    std::error_code error;
    fs::create_directories(path, error);
    if (error) fail(path, "create folder", error.value());
    if (!fs::is_directory(path, error)) fail(path, "create folder", ENOTDIR);
  }
  std::unique_ptr<OutputFile> create(const std::string& path) override {
    return std::make_unique<DiskFile>(path);
  }
  void rename(const std::string& from, const std::string& to) override {
    if (fs::exists(fs::symlink_status(to))) fail(from, fmt::format("rename to {}", to), EEXIST);
    if (::rename(from.c_str(), to.c_str()) != 0) fail(from, fmt::format("rename to {}", to), errno);
  }
  void sync_folder(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) fail(path, "open folder", errno);
    const int error = ::fsync(descriptor) == 0 ? 0 : errno;
    ::close(descriptor);
    if (error != 0) fail(path, "sync folder", error);
  }
  void remove_folder(const std::string& path) override {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail(path, "remove folder", error.value());
  }
};

}  // namespace

std::shared_ptr<FileSystem> make_disk() { return std::make_shared<Disk>(); }

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) fail(path_, "open", errno);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(int64_t offset, std::span<std::byte> into) const {
  while (!into.empty()) {
    const ssize_t n = ::pread(descriptor_, into.data(), into.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, fmt::format("read at byte {}", offset), errno);
    if (n == 0) raise<FileError>("{}: ends at byte {}, {} more wanted", path_, offset, into.size());
    offset += n;
    into = into.subspan(n);
  }
}

int64_t InputFile::size() const {
  struct stat info;
  if (::fstat(descriptor_, &info) != 0) fail(path_, "examine", errno);
  return info.st_size;
}

std::string read_text(const std::string& path) {
  const InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace dovetail

#include "dovetail/trainer/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "dovetail/base/error.h"

namespace dovetail::trainer {
namespace {

constexpr size_t kMapFrom = size_t{1}
                            << 20;  // below, a mapping of its own is not worth a kernel entry

class Descriptor {
 public:
  explicit Descriptor(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) fail("open");
  }
  ~Descriptor() { ::close(fd_); }
  int get() const { return fd_; }
  [[noreturn]] void fail(const char* verb) const {
    raise<FileError>("{}: cannot {}: {}", path_, verb, std::strerror(errno));
  }
  size_t size() const {
    struct stat info{};
    if (::fstat(fd_, &info) != 0) fail("stat");
    if (!S_ISREG(info.st_mode)) raise<FileError>("{}: wanted a regular file", path_);
    return static_cast<size_t>(info.st_size);
  }
  void read(std::byte* out, size_t size) const {
    for (size_t done = 0; done < size;) {
      const ssize_t n = ::read(fd_, out + done, size - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("read");
      if (n == 0) raise<FileError>("{}: ended at byte {}, wanted {}", path_, done, size);
      done += static_cast<size_t>(n);
    }
  }

 private:
  const std::string& path_;
  int fd_;
};

struct Mapping {
  std::span<const std::byte> bytes;
  explicit Mapping(std::span<const std::byte> b) : bytes(b) {}
  Mapping(const Mapping&) = delete;
  ~Mapping() { ::munmap(const_cast<std::byte*>(bytes.data()), bytes.size()); }
};

struct Contents {
  std::vector<std::byte> owned;
  std::span<const std::byte> bytes;
};

}  // namespace

std::shared_ptr<const std::span<const std::byte>> map_file(const std::string& path) {
  const Descriptor file(path);
  const size_t size = file.size();
  if (size >= kMapFrom) {
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (address == MAP_FAILED) file.fail("map");
    auto mapping =
        std::make_shared<Mapping>(std::span(static_cast<const std::byte*>(address), size));
    return {mapping, &mapping->bytes};
  }
  auto contents = std::make_shared<Contents>();
  contents->owned.resize(size);
  file.read(contents->owned.data(), size);
  contents->bytes = contents->owned;
  return {contents, &contents->bytes};
}

std::string read_text_file(const std::string& path) {
  const Descriptor file(path);
  std::string text(file.size(), '\0');
  file.read(reinterpret_cast<std::byte*>(text.data()), text.size());
  return text;
}

}  // namespace dovetail::trainer

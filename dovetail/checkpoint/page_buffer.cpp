#include "dovetail/checkpoint/page_buffer.h"

#include <sys/mman.h>

#include <new>

namespace dovetail {

PageBuffer::PageBuffer(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // a wish; refusal costs only time
  data_ = static_cast<std::byte*>(memory);
}

void PageBuffer::release() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
  data_ = nullptr;
  bytes_ = 0;
}

}  // namespace dovetail

#include "dovetail/comm/c10d/nccl_backend.h"

#include "dovetail/base/error.h"

#if defined(USE_C10D_NCCL) && __has_include(<nccl.h>) && __has_include(<cuda_runtime.h>)
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace dovetail::comm {

void require_nccl() {}

c10::intrusive_ptr<::c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<::c10d::Store>& store, int rank,
                                                      int size, std::chrono::milliseconds timeout) {
  auto options = ::c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  return c10::make_intrusive<::c10d::ProcessGroupNCCL>(store, rank, size, options);
}

}  // namespace dovetail::comm
#else

namespace dovetail::comm {

void require_nccl() {
  raise<ConfigError>("backend nccl: Dovetail was built without NCCL (torch without CUDA, or no nccl.h); wanted gloo");
}

c10::intrusive_ptr<::c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<::c10d::Store>&, int, int,
                                                      std::chrono::milliseconds) {
  require_nccl();
  return {};
}

}  // namespace dovetail::comm
#endif

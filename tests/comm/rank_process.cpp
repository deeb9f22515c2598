#include <sys/prctl.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "dovetail/base/error.h"
#include "dovetail/base/hash.h"
#include "dovetail/comm/c10d/world.h"
#include "tests/comm/processes.h"
#include "tests/comm/transports.h"

namespace dovetail::comm {
namespace {

// One of everything in a group; returns a hash of what this rank holds afterwards.
uint64_t round_in(Group& g, int64_t each, int64_t step, std::string_view label) {
  const int n = g.size(), global = g.global_ranks()[g.rank()];
  std::vector<float> output(static_cast<size_t>(each)), norm(100), private_input;
  std::shared_ptr<std::byte> shared_input;
  if (SharedMemory* shared = g.shared_memory())
    shared_input = shared->allocate(each * n * 4);
  else
    private_input.resize(static_cast<size_t>(each * n));
  float* input = shared_input ? reinterpret_cast<float*>(shared_input.get()) : private_input.data();
  for (int64_t i = 0; i < each * n; ++i) input[i] = static_cast<float>((i * 31 + global * 7 + step) % 1009) * 0.37f;
  for (int i = 0; i < 100; ++i) norm[i] = static_cast<float>(i + global) * 0.1f;
  const auto slices = even_slices(n, each);
  std::vector<std::byte> scratch(static_cast<size_t>(g.reduce_scratch_bytes(DType::f32, slices)));
  std::vector<std::byte> norm_scratch(static_cast<size_t>(g.all_reduce_scratch_bytes(100)));
  auto reduce =
      g.reduce_scatter({reinterpret_cast<const std::byte*>(input), DType::f32, slices, output.data(), false, scratch},
                       {Phase::reduce, 0, step, label});
  auto all = g.all_reduce(norm, norm_scratch, {Phase::norm, -1, step, label});
  reduce->wait();
  std::vector<float> whole(static_cast<size_t>(each * n));
  GatherPlane plane{std::as_bytes(std::span(output)).data(), std::as_writable_bytes(std::span(whole)).data(),
                    even_slices(n, each * 4)};
  Gathered gathered = g.all_gather({&plane, 1}, {Phase::gather_forward, 0, step, label});
  gathered.work->wait();
  all->wait();
  return hash64({gathered.whole[0], static_cast<size_t>(each * n * 4)}, hash64(std::as_bytes(std::span(norm))));
}

struct Grid {
  std::unique_ptr<Group> pairs, across;
};

// Pairs (0 1)(2 3) and the groups across them; an odd rank out is alone.
Grid make_grid(Group& world) {
  std::vector<std::vector<int>> pairs, across(2);
  for (int r = 0; r < world.size(); r += 2)
    pairs.push_back(r + 1 < world.size() ? std::vector{r, r + 1} : std::vector{r});
  for (int r = 0; r < world.size(); ++r) across[r % 2].push_back(r);
  return {world.split(pairs), world.split(across)};
}

void normal(Group& world) {
  const Grid grid = make_grid(world);
  uint64_t hash = 0;
  for (int step = 0; step < 10; ++step) {
    hash ^= round_in(world, 5000 + step, step, "world");
    round_in(*grid.pairs, 300'000, step, "pair");
    round_in(*grid.across, 1000, step, "across");
  }
  world.barrier({Phase::control, -1, 10, "end"});
  std::printf("hash %016lx\n", static_cast<unsigned long>(hash));
}

// Collectives on tensors of a device.
void device(Group& world, at::Device where) {
  const int64_t each = 10'000, n = world.size(), total = each * n;
  const auto slices = even_slices(world.size(), each);
  const auto floats = at::TensorOptions().dtype(at::kFloat);
  auto bytes_of = [](const at::Tensor& t) { return static_cast<std::byte*>(t.data_ptr()); };
  auto span_of = [](const at::Tensor& t) { return std::span(t.data_ptr<float>(), static_cast<size_t>(t.numel())); };
  uint64_t hash = 0;
  for (int64_t step = 0; step < 5; ++step) {
    at::Tensor values = at::empty({total}, floats);
    for (int64_t i = 0; i < total; ++i) values.data_ptr<float>()[i] = value_at(world.rank() + step, i);
    // In the arena in every other step, where there is one.
    std::shared_ptr<std::byte> piece;
    at::Tensor input = at::empty({total}, floats.device(where));
    if (world.shared_memory() && step % 2 == 0) {
      piece = world.shared_memory()->allocate(total * 4);
      input = tensor_at(piece.get(), total, at::kFloat, where);
    }
    input.copy_(values);
    const at::Tensor output = at::empty({each}, floats.device(where)), whole = at::empty_like(input);
    const int64_t room =
        std::max(world.reduce_scratch_bytes(DType::f32, slices), world.all_reduce_scratch_bytes(total));
    const at::Tensor scratch = at::empty({room}, floats.dtype(at::kByte).device(where));
    const std::span<std::byte> space(bytes_of(scratch), static_cast<size_t>(room));
    world.reduce_scatter({bytes_of(input), DType::f32, slices, output.data_ptr<float>(), false, space},
                         {Phase::reduce, 0, step, "device"})->wait();
    const GatherPlane plane{bytes_of(output), bytes_of(whole), even_slices(world.size(), each * 4)};
    world.all_gather({&plane, 1}, {Phase::gather_forward, 0, step, "device"}).work->wait();
    world.all_reduce(span_of(input), space, {Phase::norm, 0, step, "device"})->wait();
    for (const at::Tensor& result : {whole.cpu(), input.cpu()}) hash = hash64(std::as_bytes(span_of(result)), hash);
  }
  std::printf("hash %016lx\n", static_cast<unsigned long>(hash));
}

void loop(Group& world, const std::string& scenario) {
  const Grid grid = make_grid(world);
  for (int64_t step = 0;; ++step) {
    round_in(*grid.pairs, 200'000, step, "pair");
    round_in(*grid.across, 200'000, step, "across");
    if (step == 3) {
      std::printf("running\n");
      std::fflush(stdout);
    }
    if (step == 4 && world.rank() == 1) {
      if (scenario == "throw") raise<FileError>("data.bin: truncated");
      if (scenario == "exit") return;
    }
  }
}

}  // namespace

int rank_process(int argc, char** argv) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is ended from outside leaves no rank behind
  const std::string transport = argv[2], scenario = argv[3];
  WorldOptions options;
  options.rank = std::atoi(argv[4]);
  options.size = std::atoi(argv[5]);
  options.port = static_cast<uint16_t>(std::atoi(argv[6]));
  options.listen_fd = std::atoi(argv[7]);
  options.holds_store = options.rank == 0;
  options.deadline = std::chrono::milliseconds(std::atoi(argv[8]));
  if (transport == "peer" || transport == "hosts") options.peers.emplace();
  if (transport == "hosts") options.peers->ranks_per_host = 2;
  at::Device where = at::kCPU;
  if (transport == "symmetric") {
    options.backend = WorldBackend::symmetric;
    options.arena = int64_t{16} << 20;
    options.device = options.rank % c10::impl::VirtualGuardImpl(at::kCUDA).deviceCount();
    where = at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options.device));
  }
  try {
    const auto world = make_world(options);
    try {
      if (scenario == "device") {
        device(*world, where);
      } else {
        scenario == "normal" ? normal(*world) : loop(*world, scenario);
      }
    } catch (const FileError& error) {
      world->fail(error.what());
      throw;
    }
    return 0;
  } catch (const CommError& error) {
    std::printf("%s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 4;
  }
}

}  // namespace dovetail::comm

int main(int argc, char** argv) {
  if (argc == 9 && std::strcmp(argv[1], "rank-process") == 0) return dovetail::comm::rank_process(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

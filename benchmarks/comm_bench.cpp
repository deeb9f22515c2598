// All-gather, reduce-scatter and barrier: ours over Gloo's messages on loopback, Gloo's own, for sums
// Gloo's all-to-all with our sum; and in shared memory (peer), beside the same sum over as much
// private memory on every rank at once (bound): what the memory allows; and the same until all
// ranks have begun and ended (all done), which no reduction can do without, and which costs more
// where ranks share cores. Ranks are processes;
// candidates take turns round by round; a round's time is its slowest rank's, and the median over
// the rounds is reported. MIB is one member's slice, so the whole is RANKS * MIB.
//
//   comm_bench collectives [--ranks 2 4] [--mib 1 8 32 64] [--rounds 7] [--json FILE]
//   comm_bench sum [--mib 64] [--rounds 9]
#include <CLI/CLI.hpp>
#include <arpa/inet.h>
#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "dovetail/comm/c10d/gloo_backend.h"
#include "dovetail/comm/c10d/world.h"
#include "dovetail/comm/tree_sum.h"

namespace {

using namespace dovetail;
using namespace dovetail::comm;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::vector<int> ranks{2, 4};
  std::vector<int64_t> mib{1, 8, 32, 64};
  int rounds = 7;
  std::string json;
};

struct Candidate {
  std::string name;
  std::function<void()> run;
  std::vector<double> ms;
};

double since_ms(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// Each round's slowest rank.
std::vector<double> slowest(Group& world, const std::vector<double>& mine) {
  std::vector<double> worst(mine.size(), 0);
  for (const auto& bytes : world.gather_bytes(std::as_bytes(std::span(mine)), {})) {
    std::vector<double> theirs(mine.size());
    std::memcpy(theirs.data(), bytes.data(), bytes.size());
    for (size_t i = 0; i < worst.size(); ++i) worst[i] = std::max(worst[i], theirs[i]);
  }
  return worst;
}

void report(Group& world, const Settings& s, const std::string& operation, int64_t mib,
            std::vector<Candidate>& candidates) {
  for (int round = 0; round <= s.rounds; ++round) {
    for (Candidate& c : candidates) {
      world.barrier({});
      const auto start = Clock::now();
      c.run();
      if (round > 0) c.ms.push_back(since_ms(start));  // the first round warms up
    }
  }
  std::string line = fmt::format("{:15} {:5} {:6}", operation, world.size(), mib);
  std::string json =
      fmt::format("{{\"operation\":\"{}\",\"ranks\":{},\"mib\":{}", operation, world.size(), mib);
  double first = 0;
  for (Candidate& c : candidates) {
    const double ms = median(slowest(world, c.ms));
    if (first == 0) first = ms;
    line += fmt::format("  {:>9} {:8.3f} ms ({:4.2f})", c.name, ms, ms / first);
    json += fmt::format(",\"{}_ms\":{:.4f}", c.name, ms);
  }
  if (world.rank() != 0) return;
  fmt::print("{}\n", line);
  std::fflush(stdout);
  if (!s.json.empty()) std::ofstream(s.json, std::ios::app) << json << "}\n";
}

void bench_barrier(Group& world, Group& peers, ::c10d::Backend& gloo, const Settings& s) {
  constexpr int kTimes = 100;
  std::vector<Candidate> barriers{
      {"100 peer", [&] { for (int i = 0; i < kTimes; ++i) peers.barrier({}); }, {}},
      {"100 messages", [&] { for (int i = 0; i < kTimes; ++i) world.barrier({}); }, {}},
      {"100 gloo", [&] { for (int i = 0; i < kTimes; ++i) gloo.barrier()->wait(); }, {}}};
  report(peers, s, "barrier", 0, barriers);
}

void bench_size(Group& world, Group& peers, ::c10d::Backend& gloo, const Settings& s, int64_t mib) {
  const int n = world.size();
  const int64_t each = (mib << 20) / 4;
  at::Tensor whole = at::full({each * n}, 1.0f), shard = at::full({each}, 1.0f),
             received = at::empty({each * n}, at::kFloat);
  std::vector<Interval> bytes, elements;
  for (int m = 0; m < n; ++m) {
    bytes.push_back({m * each * 4, (m + 1) * each * 4});
    elements.push_back({m * each, (m + 1) * each});
  }
  auto* data = static_cast<std::byte*>(whole.mutable_data_ptr());
  const GatherPlane plane{data + bytes[world.rank()].begin, data, bytes};
  std::vector<Candidate> gather{
      {"messages",
       [&] { world.all_gather({&plane, 1}, {Phase::gather_forward, -1, 0, "bench"}).work->wait(); },
       {}},
      {"gloo", [&] { gloo._allgather_base(whole, shard)->wait(); }, {}}};
  report(world, s, "all_gather", mib, gather);

  std::vector<std::byte> scratch(
      static_cast<size_t>(world.reduce_scratch_bytes(DType::f32, elements)));
  const ReduceScatter request{data, DType::f32, elements, shard.data_ptr<float>(), false, scratch};
  std::vector<int> ranks(world.global_ranks().begin(), world.global_ranks().end());
  const SumTree tree(ranks);
  const std::shared_ptr<std::byte> shared = peers.shared_memory()->allocate(each * n * 4);
  std::memcpy(shared.get(), data, static_cast<size_t>(each * n * 4));
  const ReduceScatter in_place{shared.get(), DType::f32, elements, shard.data_ptr<float>(), false, {}};
  // As cold as what peers read: nothing else touches it in a round.
  at::Tensor apart[2], sums[2];
  std::vector<const std::byte*> private_inputs[2];
  for (int i = 0; i < 2; ++i) {
    apart[i] = at::full({each * n}, 1.0f), sums[i] = at::full({each}, 1.0f);
    for (int m = 0; m < n; ++m)
      private_inputs[i].push_back(static_cast<const std::byte*>(apart[i].const_data_ptr()) + bytes[m].begin);
  }
  std::vector<Candidate> reduce{
      {"bound",
       [&] {
         tree.sum(private_inputs[0], DType::f32, {sums[0].data_ptr<float>(), static_cast<size_t>(each)});
       },
       {}},
      {"all done",
       [&] {
         peers.barrier({});
         tree.sum(private_inputs[1], DType::f32, {sums[1].data_ptr<float>(), static_cast<size_t>(each)});
         peers.barrier({});
       },
       {}},
      {"peer", [&] { peers.reduce_scatter(in_place, {Phase::reduce, -1, 0, "bench"})->wait(); }, {}},
      {"messages",
       [&] { world.reduce_scatter(request, {Phase::reduce, -1, 0, "bench"})->wait(); },
       {}},
      {"gloo", [&] { gloo._reduce_scatter_base(shard, whole)->wait(); }, {}},
      {"alltoall",
       [&] {
         std::vector<int64_t> counts;
         gloo.alltoall_base(received, whole, counts, counts)->wait();
         std::vector<const std::byte*> inputs;
         for (int m = 0; m < n; ++m)
           inputs.push_back(static_cast<const std::byte*>(received.const_data_ptr()) +
                            bytes[m].begin);
         tree.sum(inputs, DType::f32, {shard.data_ptr<float>(), static_cast<size_t>(each)});
       },
       {}}};
  report(peers, s, "reduce_scatter", mib, reduce);
}

void run_rank(const Settings& s, int rank, int size, int port, int listener) {
  ::c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<uint16_t>(port);
  tcp.isServer = rank == 0;
  tcp.waitWorkers = false;
  if (rank == 0) tcp.masterListenFd = listener;
  const auto store = c10::make_intrusive<::c10d::TCPStore>("127.0.0.1", tcp);
  WorldOptions options;
  options.rank = rank;
  options.size = size;
  options.store = store;
  const auto world = make_world(options);
  const auto gloo = make_gloo_backend(c10::make_intrusive<::c10d::PrefixStore>("own", store), rank,
                                      size, {"127.0.0.1", {}});
  options.name = "peers";
  options.peers.emplace();
  const auto peers = make_world(options);
  bench_barrier(*world, *peers, *gloo, s);
  for (int64_t mib : s.mib) bench_size(*world, *peers, *gloo, s, mib);
  peers->barrier({});
  world->barrier({});
}

int collectives(const Settings& s) {
  for (int size : s.ranks) {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener, generic, length) || listen(listener, 64) ||
        getsockname(listener, generic, &length))
      return 1;
    std::fflush(stdout);
    std::vector<pid_t> children;
    for (int rank = 0; rank < size; ++rank) {
      const pid_t child = fork();
      if (child == 0) {
        run_rank(s, rank, size, ntohs(address.sin_port), listener);
        std::fflush(stdout);
        _exit(0);
      }
      children.push_back(child);
    }
    close(listener);
    for (pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      if (status != 0) return 1;
    }
  }
  return 0;
}

// The sum alone, in memory: bytes read and written per second.
int sums(int64_t mib, int rounds) {
  const int64_t count = (mib << 20) / 4;
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (int n : {2, 4, 8}) {
      std::vector<std::vector<std::byte>> memory(static_cast<size_t>(n));
      std::vector<const std::byte*> inputs;
      std::vector<int> ranks;
      for (int m = 0; m < n; ++m) {
        memory[m].resize(static_cast<size_t>(count * size_of(dtype)), std::byte{1});
        inputs.push_back(memory[m].data());
        ranks.push_back(m);
      }
      std::vector<float> output(static_cast<size_t>(count));
      std::vector<double> ms;
      for (int round = 0; round < rounds; ++round) {
        const auto start = Clock::now();
        SumTree(ranks).sum(inputs, dtype, output);
        ms.push_back(since_ms(start));
      }
      const double bytes = static_cast<double>(count) * (n * size_of(dtype) + 4);
      fmt::print("sum of {} {:4} {:4} MiB out  {:8.2f} ms  {:6.1f} GB/s\n", n, name_of(dtype), mib,
                 median(ms), bytes / median(ms) / 1e6);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Communication benchmarks"};
  app.require_subcommand(1);
  Settings s;
  auto* collective =
      app.add_subcommand("collectives", "beside Gloo's own, ranks as processes on loopback");
  collective->add_option("--ranks", s.ranks, "world sizes");
  collective->add_option("--mib", s.mib, "MiB of one member's slice");
  collective->add_option("--rounds", s.rounds)->check(CLI::PositiveNumber);
  collective->add_option("--json", s.json, "append JSON lines to this file");
  int64_t mib = 64;
  int rounds = 9;
  auto* sum = app.add_subcommand("sum", "the sum over ranks, in memory");
  sum->add_option("--mib", mib)->check(CLI::PositiveNumber);
  sum->add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return collective->parsed() ? collectives(s) : sums(mib, rounds);
}

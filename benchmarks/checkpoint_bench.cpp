// Saving and loading a checkpoint: the state of a 110M-parameter model with AdamW (1262.7 MiB), N
// ranks as threads.
//   build/bin/checkpoint_bench FOLDER [RANKS=4] [MIB=1262] [ROUNDS=3]
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "dovetail/checkpoint/load.h"
#include "dovetail/checkpoint/writer.h"
#include "dovetail/comm/threads/spawn.h"

namespace dovetail {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Weights and two moments of tensors of one MiB elements each, cut evenly.
struct BenchShard {
  BenchShard(int64_t mib, int world, int rank) {
    const int64_t numel = 1 << 20, tensors = mib / 12;
    const Interval mine{numel * rank / world, numel * (rank + 1) / world};
    memory.assign(tensors * 3 * mine.size(), 0.5f);
    for (int64_t i = 0; i < tensors * 3; ++i) {
      const char* fields[] = {"weight", "adamw.exp_avg", "adamw.exp_avg_sq"};
      state.push_back({.tensor = fmt::format("layers.{}", i / 3),
                       .field = fields[i % 3],
                       .shape = {1024, 1024},
                       .dtype = DType::f32,
                       .elements = mine,
                       .data = reinterpret_cast<std::byte*>(memory.data() + i * mine.size()),
                       .writer = true});
    }
  }
  std::vector<float> memory;
  ShardedState state;
};

void run(const std::string& folder, int ranks, int64_t mib, int rounds) {
  comm::spawn(ranks, [&](comm::Group& world) {
    BenchShard shard(mib, world.size(), world.rank());
    CheckpointWriter writer(world, {.folder = folder, .keep = 1});
    for (int round = 1; round <= rounds; ++round) {
      world.barrier({});
      const double start = now();
      writer.begin(shard.state, {}, {.step = round});
      const double begun = now();
      const SavedCheckpoint saved = *writer.finish();
      const double end = now();
      load_checkpoint(saved.path, shard.state, {}, world);
      if (world.rank() != 0) continue;
      const double size = static_cast<double>(saved.bytes) / (1 << 20);
      fmt::print(
          "{:.1f} MiB, {} ranks: training waits {:.3f} s, on disk after {:.3f} s ({:.0f} MiB/s), ",
          size, ranks, begun - start, end - start, size / (end - start));
      fmt::print("load, verified, warm: {:.3f} s ({:.0f} MiB/s)\n", now() - end,
                 size / (now() - end));
    }
  });
}

}  // namespace
}  // namespace dovetail

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print("usage: checkpoint_bench FOLDER [RANKS=4] [MIB=1262] [ROUNDS=3]\n");
    return 2;
  }
  const auto number = [&](int i, int64_t usual) { return argc > i ? std::stoll(argv[i]) : usual; };
  dovetail::run(argv[1], static_cast<int>(number(2, 4)), number(3, 1262),
                static_cast<int>(number(4, 3)));
  return 0;
}

#pragma GCC optimize("O3")
#include "dovetail/comm/tree_sum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "dovetail/base/error.h"

// Sanitizers cannot run inside the resolvers that pick a clone.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define DT_CLONES
#else
#define DT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif

namespace dovetail::comm {
namespace {

// Elements of a temporary: 4 KiB, so that a few levels and their inputs stay in the first-level cache.
constexpr int64_t kBlock = 1024;
// Elements that are shown at a time: 16 KiB.
constexpr int64_t kShown = 4096;

struct F32 {
  static constexpr int kSize = 4;
};
struct Bf16 {
  static constexpr int kSize = 2;
};

inline float load(F32, const std::byte* p, int64_t i) {
  float v;
  std::memcpy(&v, p + 4 * i, 4);
  return v;
}
inline float load(Bf16, const std::byte* p, int64_t i) {
  uint16_t v;
  std::memcpy(&v, p + 2 * i, 2);
  return std::bit_cast<float>(static_cast<uint32_t>(v) << 16);
}

// One loop per (source type, number of leaves, assign or add). Clones cannot be templates.
#define DT_KERNELS(T, suffix)                                                                              \
  DT_CLONES void assign1_##suffix(float* __restrict out, const std::byte* a, int64_t n) {                  \
    for (int64_t i = 0; i < n; ++i) out[i] = load(T{}, a, i);                                              \
  }                                                                                                        \
  DT_CLONES void assign2_##suffix(float* __restrict out, const std::byte* a, const std::byte* b, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) out[i] = load(T{}, a, i) + load(T{}, b, i);                            \
  }                                                                                                        \
  DT_CLONES void add1_##suffix(float* __restrict out, const std::byte* a, int64_t n) {                     \
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + load(T{}, a, i);                                     \
  }                                                                                                        \
  DT_CLONES void add2_##suffix(float* __restrict out, const std::byte* a, const std::byte* b, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) out[i] = out[i] + (load(T{}, a, i) + load(T{}, b, i));                 \
  }
DT_KERNELS(F32, f32)
DT_KERNELS(Bf16, bf16)
#undef DT_KERNELS

DT_CLONES void scale_f32(float* out, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] *= scale;
}

struct Kernels {
  int size;
  void (*assign1)(float*, const std::byte*, int64_t);
  void (*assign2)(float*, const std::byte*, const std::byte*, int64_t);
  void (*add1)(float*, const std::byte*, int64_t);
  void (*add2)(float*, const std::byte*, const std::byte*, int64_t);
};

Kernels kernels_of(DType dtype) {
  if (dtype == DType::f32) return {F32::kSize, assign1_f32, assign2_f32, add1_f32, add2_f32};
  if (dtype == DType::bf16) return {Bf16::kSize, assign1_bf16, assign2_bf16, add1_bf16, add2_bf16};
  raise<ConfigError>("sums over ranks take fp32 or bf16, got {}", name_of(dtype));
}

int split_at(std::span<const int> ranks, int first, int last) {
  const uint32_t low = ranks[first], high = ranks[last - 1];
  const int bound = static_cast<int>(high & ~(std::bit_floor(low ^ high) - 1));
  return static_cast<int>(std::lower_bound(ranks.begin() + first, ranks.begin() + last, bound) - ranks.begin());
}

// Evaluates one block of the tree. Leaves are (member, rank) pairs sorted by rank.
struct Block {
  const Kernels& kernels;
  std::span<const std::byte* const> inputs;
  std::span<const int> members, ranks;
  int64_t begin, count;

  const std::byte* leaf(int i) const { return inputs[members[i]] + begin * kernels.size; }

  void evaluate(int first, int last, float* out) const {
    if (last - first == 1) return kernels.assign1(out, leaf(first), count);
    if (last - first == 2) return kernels.assign2(out, leaf(first), leaf(first + 1), count);
    const int middle = split_at(ranks, first, last);
    // A pair is summed on the way into its sibling; addition commutes, so either side may be the one in memory.
    if (last - middle <= 2) {
      evaluate(first, middle, out);
      add(middle, last, out);
    } else {
      evaluate(middle, last, out);
      add(first, middle, out);
    }
  }

  // out += the subtree.
  void add(int first, int last, float* out) const {
    if (last - first == 1) return kernels.add1(out, leaf(first), count);
    if (last - first == 2) return kernels.add2(out, leaf(first), leaf(first + 1), count);
    alignas(64) float temporary[kBlock];
    evaluate(first, last, temporary);
    add1_f32(out, reinterpret_cast<const std::byte*>(temporary), count);
  }
};

}  // namespace

SumTree::SumTree(std::span<const int> ranks) : members_(ranks.size()), ranks_(ranks.begin(), ranks.end()) {
  for (size_t i = 0; i < members_.size(); ++i) members_[i] = static_cast<int>(i);
  std::sort(members_.begin(), members_.end(), [&](int a, int b) { return ranks[a] < ranks[b]; });
  std::sort(ranks_.begin(), ranks_.end());
  DT_CHECK(!ranks_.empty() && ranks_.front() >= 0, "a sum over ranks needs at least one, numbered from 0");
  DT_CHECK(std::adjacent_find(ranks_.begin(), ranks_.end()) == ranks_.end(), "a rank appears twice");
}

int SumTree::split(std::span<const int> ranks, int first, int last) { return split_at(ranks, first, last); }

void SumTree::sum(std::span<const std::byte* const> inputs, DType dtype, std::span<float> output,
                  const SumOutput& how) const {
  DT_CHECK_EQ(inputs.size(), members_.size());
  const Kernels kernels = kernels_of(dtype);
  const int n = static_cast<int>(members_.size());
  const int64_t total = static_cast<int64_t>(output.size());
  // With one or two leaves there is no temporary to keep in cache, and often nothing to do after the sum.
  const bool scales = how.scale != 1;
  int64_t step = n <= 2 ? std::max<int64_t>(total, 1) : kBlock;
  if (how.finished || scales) step = std::min(step, how.accumulate && scales ? kBlock : kShown);
  alignas(64) float temporary[kBlock];
  for (int64_t begin = 0; begin < total; begin += step) {
    const Block block{kernels, inputs, members_, ranks_, begin, std::min(step, total - begin)};
    float* out = output.data() + begin;
    if (!how.accumulate) {
      block.evaluate(0, n, out);
      if (scales) scale_f32(out, how.scale, block.count);
    } else if (scales) {
      block.evaluate(0, n, temporary);
      scale_f32(temporary, how.scale, block.count);
      add1_f32(out, reinterpret_cast<const std::byte*>(temporary), block.count);
    } else {
      block.add(0, n, out);
    }
    if (how.finished) how.finished(begin, {out, static_cast<size_t>(block.count)});
  }
}

}  // namespace dovetail::comm

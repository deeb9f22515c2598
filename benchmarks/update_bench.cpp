// Speed of the element operations on one thread, beside torch's own fused kernels where it has
// them. The candidates take turns round by round; the best round of each counts.
//
// usage: update_bench [elements [rounds]]
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "dovetail/numerics/bf16.h"
#include "dovetail/numerics/reproducible_sum.h"
#include "dovetail/update/adamw.h"
#include "dovetail/update/sgd.h"

namespace {

using namespace dovetail;

struct Candidate {
  std::string name;
  int bytes;  // read and written per element
  std::function<void()> run;
  double best = 1e30;
};

std::span<float> span_of(const at::Tensor& t) {
  return {t.data_ptr<float>(), static_cast<size_t>(t.numel())};
}

// Weight, gradient and two state fields.
struct Tensors {
  explicit Tensors(int64_t n)
      : w(at::randn({n})), g(at::randn({n}).mul_(1e-3)), m(at::zeros_like(w)),
        v(at::zeros_like(w)) {}
  at::Tensor w, g, m, v;
};

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::stoll(argv[1]) : int64_t{1} << 25;
  const int rounds = argc > 2 ? std::stoi(argv[2]) : 15;
  at::set_num_threads(1);
  Tensors a(n), b(n);
  at::Tensor step = at::full({}, 5.0);
  std::vector<uint16_t> half(static_cast<size_t>(n));
  double sink = 0;

  const AdamWOptions adamw{0.9, 0.95, 1e-8};
  const SgdOptions sgd{.momentum = 0.9};
  const StepContext context{.step = 5, .lr = 1e-4f};
  const ParameterFactors factors{.weight_decay = 0.1};
  std::vector<Candidate> all = {
      {"adamw", 28,
       [&] {
         adamw_update(adamw_coefficients(adamw, factors, context), span_of(a.w), span_of(a.g),
                      span_of(a.m), span_of(a.v));
       }},
      {"adamw, torch fused", 28,
       [&] {
         at::_fused_adamw_({b.w}, {b.g}, {b.m}, {b.v}, {}, {step}, 1e-4, 0.9, 0.95, 0.1, 1e-8,
                           false, false);
       }},
      {"sgd momentum", 20,
       [&] {
         sgd_momentum_update(sgd_coefficients(sgd, factors, context), false, span_of(a.w),
                             span_of(a.g), span_of(a.m));
       }},
      {"sgd momentum, torch fused", 20,
       [&] { at::_fused_sgd_({b.w}, {b.g}, {b.m}, 0.1, 0.9, 1e-4, 0.0, false, false, false); }},
      {"sum of squares", 4,
       [&] {
         ReproducibleSum sum;
         sum.add(span_of(a.g));
         sink += sum.result();
       }},
      {"norm, torch", 4, [&] { sink += b.g.norm().item<double>(); }},
      {"bf16 encode", 6, [&] { encode_bf16(span_of(a.g), half); }},
      {"bf16 encode, torch", 6, [&] { sink += b.g.to(at::kBFloat16).numel(); }},
      {"copy, torch", 8, [&] { b.m.copy_(b.g); }},
  };
  for (int round = 0; round < rounds; ++round)
    for (Candidate& c : all) {
      const auto start = std::chrono::steady_clock::now();
      c.run();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      c.best = std::min(c.best, time.count());
    }
  fmt::print("{} elements, 1 thread, best of {} rounds\n", n, rounds);
  fmt::print("{:<28}{:>12}{:>12}{:>10}\n", "", "ns/element", "GElem/s", "GB/s");
  for (const Candidate& c : all)
    fmt::print("{:<28}{:>12.3f}{:>12.3f}{:>10.1f}\n", c.name, c.best * 1e9 / n, n / c.best * 1e-9,
               c.bytes * n / c.best * 1e-9);
  return sink == 0.12345;  // keeps the results alive
}

// One training step of the comparison model (sizes S and M), timed as the rivals' script times
// theirs; rank 0 appends one JSON line. Started by a launcher, one process a rank:
//   torchrun --no-python --nproc-per-node 2 build/bin/step_bench --size S --format fp32 --out results.jsonl
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <sstream>
#include <thread>

#include "dovetail/base/error.h"
#include "dovetail/engine/engine.h"
#include "dovetail/models/registry.h"
#include "dovetail/storage/tensor_heap.h"
#include "dovetail/trainer/launch.h"
#include "dovetail/update/optimizer.h"

using namespace dovetail;

namespace {

struct Options {
  std::string size = "S", format = "fp32", optimizer = "adamw", unit = "matrix", comm = "c10d", out;
  int64_t sequence = 256, batch = 1, steps = 10, warm = 3, zero1 = 0, zero2 = 0, zero3 = 0;
  int prefetch = 1, pending = -1;
  bool report = false;
};

double status_mib(const std::string& key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);)
    if (line.rfind(key + ":", 0) == 0) return std::stod(line.substr(key.size() + 1)) / 1024;
  return 0;
}

double max_rss_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

// The resident set with pages of several ranks divided among them.
double proportional_mib() {
  std::ifstream in("/proc/self/smaps_rollup");
  for (std::string line; std::getline(in, line);)
    if (line.rfind("Pss:", 0) == 0) return std::stod(line.substr(4)) / 1024;
  return 0;
}

// Its peak, looked at every few milliseconds for as long as this lives.
class ProportionalPeak {
 public:
  double mib() const { return peak_.load(); }

 private:
  std::atomic<double> peak_{0};
  std::jthread sampler_{[this](std::stop_token stop) {
    while (!stop.stop_requested()) {
      peak_.store(std::max(peak_.load(), proportional_mib()));
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }};
};

// Bytes sent on the loopback interface by the whole machine, as the rivals' script counts them.
double loopback_bytes() {
  std::ifstream in("/proc/net/dev");
  for (std::string line; std::getline(in, line);) {
    if (line.find("lo:") == std::string::npos) continue;
    std::istringstream fields(line.substr(line.find(':') + 1));
    double value = 0;
    for (int i = 0; i < 9; ++i) fields >> value;
    return value;
  }
  return 0;
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : (v[(v.size() - 1) / 2] + v[v.size() / 2]) / 2;
}

nlohmann::json model_options(const Options& o) {
  const bool small = o.size == "S";
  if (!small && o.size != "M") raise<ConfigError>("--size: wanted S or M, got {}", o.size);
  const int64_t dim = small ? 512 : 768, layers = small ? 8 : 12, heads = small ? 8 : 12;
  return {{"hidden_size", dim}, {"intermediate_size", small ? 1408 : 2048}, {"num_hidden_layers", layers},
          {"num_attention_heads", heads}, {"vocab_size", small ? 8192 : 16384},
          {"max_position_embeddings", o.sequence}};
}

// Tokens with a Zipf-like marginal, from (step, row) alone.
std::pair<at::Tensor, at::Tensor> batch_of(const Options& o, int64_t step, int rank, int64_t vocabulary) {
  at::Tensor tokens = at::empty({o.batch, o.sequence}, at::kLong), targets = at::empty_like(tokens);
  for (int64_t row = 0; row < o.batch; ++row) {
    std::mt19937_64 random(10000 * step + rank * o.batch + row);
    std::uniform_real_distribution<double> uniform;
    int64_t previous = 0;
    for (int64_t i = 0; i <= o.sequence; ++i) {
      const int64_t token = std::min<int64_t>(vocabulary - 1, std::pow(uniform(random), 4) * vocabulary);
      if (i > 0) {
        tokens.data_ptr<int64_t>()[row * o.sequence + i - 1] = previous;
        targets.data_ptr<int64_t>()[row * o.sequence + i - 1] = token;
      }
      previous = token;
    }
  }
  return {tokens, targets};
}

void run(const Options& o) {
  at::set_num_threads(1);
  TensorHeap::install();  // as the trainer does
  const auto info = trainer::launch_info(trainer::process_environment());
  const trainer::LaunchInfo job = info.value_or(trainer::LaunchInfo{});
  std::shared_ptr<comm::Group> world = trainer::make_job_world(job, {.backend = o.comm, .interface = {}});
  std::vector<float> warm(64, 1), scratch(world->all_reduce_scratch_bytes(64));
  world->all_reduce(warm, std::as_writable_bytes(std::span(scratch)), {})->wait();
  const double base_rss = status_mib("VmRSS"), base_max = max_rss_mib();
  const double base_proportional = proportional_mib();

  std::shared_ptr<models::Model> model = models::build_model("llama", model_options(o));
  model->reset_parameters(1234);
  EngineOptions options;
  const int64_t n = world->size();
  options.plan.degrees = {o.zero1 ? o.zero1 : n, o.zero2 ? o.zero2 : n, o.zero3 ? o.zero3 : n};
  options.plan.format = o.format;
  options.plan.prefetch = o.prefetch;
  options.plan.pending_reductions = o.pending;
  options.hints = model->specs();
  OptimizerOptions optimizer{.name = o.optimizer};
  optimizer.adamw.beta2 = 0.95;
  optimizer.muon.unit = o.unit;
  optimizer.rules.weight_decay = 0.1;
  optimizer.rules.decay_vectors = true;
  Engine engine(std::shared_ptr<torch::nn::Module>(model, &model->module()), world, options,
                make_optimizer(optimizer, model->specs()));

  std::optional<ProportionalPeak> sampler;
  std::vector<double> total, forward, backward, update, sent, loss;
  auto plan_sent = plan::sent_bytes(engine.plan(), world->rank(), {});
  for (const auto& [field, bytes] : engine.predicted_fragment_bytes()) plan_sent.fragment += bytes;
  if (o.report && world->rank() == 0) fmt::print("{}", engine.owner_report());
  // Where ranks share pages, two more steps that are not timed: looking takes time.
  const int64_t looked_at = o.comm == "peer" ? 2 : 0;
  for (int64_t step = 0; step < o.steps + looked_at; ++step) {
    if (step == o.steps) sampler.emplace();
    const auto [tokens, targets] = batch_of(o, step, world->rank(), model->vocabulary());
    if (step == 2) std::ofstream("/proc/self/clear_refs") << "5";  // steady-state peak, without the build
    world->barrier({});
    const comm::Counts before = world->counters().read();
    const double bytes = loopback_bytes(), t0 = seconds();
    ops::LossSum l = model->loss(tokens, targets);
    const double t1 = seconds();
    l.sum.backward();
    const double t2 = seconds();
    engine.step(1e-3f, 1.0 / static_cast<double>(n * o.batch * o.sequence));
    const double t3 = seconds();
    const comm::Counts counted = world->counters().read() - before;
    if (counted.sent() != plan_sent.total())
      raise<StateError>("bytes sent in step {}: planned {}, counted {}", step, plan_sent.total(), counted.sent());
    world->barrier({});
    if (step >= o.steps) continue;
    sent.push_back((loopback_bytes() - bytes) / static_cast<double>(n));
    forward.push_back(t1 - t0), backward.push_back(t2 - t1), update.push_back(t3 - t2), total.push_back(t3 - t0);
    loss.push_back(l.sum.item<double>() / static_cast<double>(o.batch * o.sequence));
  }
  const double mine[3] = {sampler ? sampler->mib() : status_mib("VmHWM"), max_rss_mib(),
                          sampler ? base_proportional : base_max};
  double hwm = 0, peak = 0, base = 0;
  for (const auto& m : world->gather_bytes(std::as_bytes(std::span(mine)), {})) {
    const auto* v = reinterpret_cast<const double*>(m.data());
    hwm = std::max(hwm, v[0]), peak = std::max(peak, v[1]), base += v[2] / static_cast<double>(n);
  }
  if (world->rank() != 0) return;
  auto tail = [&](const std::vector<double>& v) { return median({v.begin() + o.warm, v.end()}); };
  const plan::HeldBytes held = engine.held();
  std::string system = o.format == "fp32" ? "dovetail" : "dovetail_bf16";
  if (o.optimizer != "adamw") system += "_" + o.optimizer;
  if (o.comm == "peer") system += "_peer";
  const nlohmann::json line = {
      {"system", system}, {"size", o.size}, {"world", n},
      {"step", tail(total)}, {"fwd", tail(forward)}, {"bwd", tail(backward)}, {"opt", tail(update)},
      {"tx_MiB_rank", tail(sent) / (1 << 20)}, {"plan_MiB_rank", plan_sent.total() / double(1 << 20)},
      {"rss_base", base}, {"rss_max", peak}, {"rss_peak_steady", hwm}, {"rss_before_model", base_rss},
      {"held_MiB", held.total() / double(1 << 20)}, {"slots_MiB", held.slots / double(1 << 20)},
      {"loss", loss}, {"T", total}, {"O", update}};
  if (!o.out.empty()) std::ofstream(o.out, std::ios::app) << line.dump() << "\n";
  fmt::print("{} {} N={} step {:.1f} ms (f {:.0f} b {:.0f} o {:.0f}) tx {:.1f} MiB planned {:.1f} "
             "rss {:.0f}->{:.0f} steady {:.0f} held {:.0f} slots {:.0f} loss {:.4f} {:.4f}\n",
             line["system"].get<std::string>(), o.size, n, 1e3 * tail(total), 1e3 * tail(forward), 1e3 * tail(backward),
             1e3 * tail(update), tail(sent) / (1 << 20), plan_sent.total() / double(1 << 20), base, peak, hwm,
             held.total() / double(1 << 20), held.slots / double(1 << 20), loss.front(), loss.back());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("one training step of the comparison model");
  Options o;
  app.add_option("--size", o.size);
  app.add_option("--format", o.format);
  app.add_option("--seq", o.sequence);
  app.add_option("--bs", o.batch);
  app.add_option("--steps", o.steps);
  app.add_option("--warm", o.warm);
  app.add_option("--zero1", o.zero1);
  app.add_option("--zero2", o.zero2);
  app.add_option("--zero3", o.zero3);
  app.add_option("--prefetch", o.prefetch);
  app.add_option("--pending", o.pending);
  app.add_option("--optimizer", o.optimizer);
  app.add_option("--unit", o.unit);
  app.add_option("--comm", o.comm, "c10d or peer");
  app.add_flag("--report", o.report);
  app.add_option("--out", o.out);
  CLI11_PARSE(app, argc, argv);
  try {
    run(o);
  } catch (const std::exception& e) {
    fmt::print(stderr, "step_bench: {}\n", e.what());
    return 1;
  }
}

// The keys of each section, once, for reading and for writing. A visitor is called as visitor(key,
// value, limits).
#pragma once

#include <limits>

#include "dovetail/trainer/config.h"
#include "dovetail/update/optimizer.h"

namespace dovetail::trainer::config_fields {

// What values are possible. `words`: the only ones; numbers lie in [low, high], or above low when
// `open`.
struct Limits {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool open = false, open_above = false;  // (low, ..., and ..., high)
  std::vector<std::string> words{};
};
inline Limits at_least(double low) { return {low}; }
inline Limits between(double low, double high) { return {low, high}; }
inline Limits below(double low, double high) { return {.low = low, .high = high, .open_above = true}; }
inline Limits above(double low) { return {low, std::numeric_limits<double>::infinity(), true}; }
inline Limits one_of(std::vector<std::string> words) { return {.words = std::move(words)}; }
inline Limits optimizer_names() { return one_of({kOptimizers.begin(), kOptimizers.end()}); }

template <class V>
void visit(V& v, RunConfig& c) {
  v("name", c.name);
  v("folder", c.folder);
  v("seed", c.seed, at_least(0));
  v("ranks", c.ranks, between(1, 4096));
  v("threads", c.threads, between(0, 4096));
  v("tensor_heap", c.tensor_heap);
}

template <class V>
void visit(V& v, DataConfig& c) {
  v("sources", c.sources);
  v("suffixes", c.suffixes);
  v("validation", c.validation);
  v("validation_fraction", c.validation_fraction, between(0, 0.5));
  v("sequence", c.sequence, at_least(1));
  v("shuffle", c.shuffle);
  v("last_batch", c.last_batch, one_of({"drop", "keep"}));
}

template <class V>
void visit(V& v, TrainConfig& c) {
  v("steps", c.steps, at_least(1));
  v("batch", c.batch, at_least(1));
  v("micro_batch", c.micro_batch, at_least(0));
  v("clip", c.clip, at_least(0));
  v("non_finite", c.non_finite, one_of({"stop", "skip"}));
  v("log_every", c.log_every, at_least(1));
  v("validate_every", c.validate_every, at_least(0));
  v("validation_samples", c.validation_samples, at_least(0));
}

template <class V>
void visit(V& v, OptimizerConfig& c) {
  v("name", c.name, optimizer_names());
  v("lr", c.lr, above(0));
  v("schedule", c.schedule, one_of({"constant", "cosine", "linear", "wsd"}));
  v("warmup_steps", c.warmup_steps, at_least(0));
  v("lr_floor", c.lr_floor, at_least(0));
  v("decay_steps", c.decay_steps, at_least(0));
  v("tail", c.tail, one_of({"linear", "cosine", "1-sqrt"}));
  v("beta1", c.beta1, below(0, 1));
  v("beta2", c.beta2, below(0, 1));
  v("eps", c.eps, above(0));
  v("momentum", c.momentum, below(0, 1));
  v("dampening", c.dampening, between(0, 1));
  v("nesterov", c.nesterov);
  v("weight_decay", c.weight_decay, at_least(0));
  v("decay_vectors", c.decay_vectors);
  v("rules", c.rules);
}

template <class V>
void visit(V& v, MuonConfig& c) {
  v("momentum", c.momentum, below(0, 1));
  v("nesterov", c.nesterov);
  v("steps", c.steps, between(1, 100));
  v("scale", c.scale, one_of({"original", "match_rms_adamw"}));
  v("unit", c.unit);
}

template <class V>
void visit(V& v, ShampooConfig& c) {
  v("beta1", c.beta1, below(0, 1));
  v("beta2", c.beta2, between(0, 1));
  v("epsilon", c.epsilon, above(0));
  v("block", c.block, between(1, 32768));
  v("every", c.every, at_least(1));
  v("grafting", c.grafting, one_of({"none", "sgd", "rmsprop"}));
}

template <class V>
void visit(V& v, ShardConfig& c) {
  v("zero1", c.zero1, at_least(0));
  v("zero2", c.zero2, at_least(0));
  v("zero3", c.zero3, at_least(0));
  v("block", c.block);
  v("boundary", c.boundary, one_of({"any", "block", "unit"}));
  v("format", c.format, one_of({"fp32", "bf16"}));
  v("main", c.main, one_of({"fp32"}));
  v("alignment", c.alignment, at_least(1));
  v("segments", c.segments, between(1, 3));
  v("reshard_after_forward", c.reshard_after_forward);
  v("prefetch", c.prefetch, between(0, 64));
  v("pending_reductions", c.pending_reductions, between(-1, 64));
  v("local_accumulation", c.local_accumulation);
  v("recompute", c.recompute);
}

template <class V>
void visit(V& v, CommConfig& c) {
  v("backend", c.backend, one_of({"auto", "peer", "c10d", "gloo_native"}));
  v("ranks_per_host", c.ranks_per_host, at_least(0));
  v("interface", c.interface);
  v("deadline_seconds", c.deadline_seconds, between(0.1, 86400));
  v("connect_seconds", c.connect_seconds, between(0.1, 86400));
}

template <class V>
void visit(V& v, CheckpointConfig& c) {
  v("every", c.every, at_least(0));
  v("keep", c.keep, at_least(1));
}

template <class V>
void visit(V& v, SampleConfig& c) {
  v("prompt", c.prompt);
  v("tokens", c.tokens, at_least(0));
  v("temperature", c.temperature, at_least(0));
  v("top_k", c.top_k, at_least(0));
}

// section(name, struct) for every section but [model].
template <class F>
void sections(Config& c, F&& section) {
  section("run", c.run);
  section("data", c.data);
  section("train", c.train);
  section("optimizer", c.optimizer);
  section("muon", c.muon);
  section("shampoo", c.shampoo);
  section("shard", c.shard);
  section("comm", c.comm);
  section("checkpoint", c.checkpoint);
  section("sample", c.sample);
}

}  // namespace dovetail::trainer::config_fields

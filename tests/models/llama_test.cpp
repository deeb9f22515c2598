#include "dovetail/models/lm/llama.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>
#include <set>

#include "dovetail/base/error.h"
#include "dovetail/models/common/init.h"
#include "dovetail/models/lm/language_model.h"
#include "dovetail/models/lm/sample.h"
#include "dovetail/models/lm/weights.h"
#include "dovetail/models/registry.h"
#include "folder.h"

namespace dovetail::models {
namespace {

LlamaConfig tiny(bool tied = false) {
  return {.hidden_size = 24,
          .intermediate_size = 40,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .head_dim = 6,
          .vocab_size = 29,
          .max_position_embeddings = 16,
          .initializer_range = 0.2,
          .tie_word_embeddings = tied};
}

using Llama = ops::Unit<LlamaForCausalLM>;

std::shared_ptr<Llama> seeded(const LlamaConfig& config, at::ScalarType type = at::kFloat,
                              uint64_t seed = 3) {
  auto model = std::make_shared<Llama>(config, type);
  model->reset_parameters(seed);
  return model;
}

at::Tensor some_tokens(int64_t batch = 2, int64_t length = 11) {
  torch::manual_seed(9);
  return torch::randint(0, 29, {batch, length}, at::kLong);
}

template <class E, class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const E& e) {
    return e.what();
  }
  ADD_FAILURE() << "nothing of the wanted type was thrown";
  return {};
}
bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Init, PureFunctionOfSeedNameAndIndex) {
  const auto a = torch::empty({7, 11}), b = torch::empty({11, 7}).t(), c = torch::empty({7, 11});
  fill_normal(a, 0.5, 1, "w");
  fill_normal(b, 0.5, 1, "w");
  EXPECT_TRUE(at::equal(a, b));
  fill_normal(c, 0.5, 1, "v");
  EXPECT_FALSE(at::equal(a, c));
  fill_normal(c, 0.5, 2, "w");
  EXPECT_FALSE(at::equal(a, c));
  const auto half = torch::empty({7, 11}, at::kBFloat16);
  fill_normal(half, 0.5, 1, "w");
  EXPECT_TRUE(at::equal(half, a.to(at::kBFloat16)));
}

// Moments within five standard errors of a normal's.
TEST(Init, IsNormal) {
  const auto x = torch::empty({400, 1000});
  fill_normal(x, 1, 7, "x");
  const double n = 400000;
  EXPECT_NEAR(x.mean().item<double>(), 0, 5 / std::sqrt(n));
  EXPECT_NEAR(x.pow(2).mean().item<double>(), 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(x.pow(3).mean().item<double>(), 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(x.pow(4).mean().item<double>(), 3, 5 * std::sqrt(96 / n));
  EXPECT_NEAR((x.narrow(1, 0, 999) * x.narrow(1, 1, 999)).mean().item<double>(), 0,
              5 / std::sqrt(n));
  EXPECT_FALSE(x.isinf().any().item<bool>());
}

TEST(Llama, NamesAndInitialValues) {
  const auto model = seeded(tiny());
  const auto named = model->named_parameters();
  EXPECT_EQ(named.size(), 3u + 2 * 9);
  EXPECT_EQ(named["model.layers.1.self_attn.k_proj.weight"].sizes(), at::IntArrayRef({12, 24}));
  EXPECT_EQ(named["model.layers.0.mlp.down_proj.weight"].sizes(), at::IntArrayRef({24, 40}));
  EXPECT_TRUE(at::equal(named["model.norm.weight"], torch::ones({24})));
  EXPECT_NEAR(named["model.layers.0.mlp.up_proj.weight"].std().item<double>(), 0.2, 0.02);
  EXPECT_NEAR(named["model.layers.0.mlp.down_proj.weight"].std().item<double>(), 0.1, 0.01);
  const auto again = seeded(tiny());
  for (const auto& item : again->named_parameters())
    EXPECT_TRUE(at::equal(item.value(), named[item.key()])) << item.key();
}

TEST(Llama, LossIsThatOfTheLogitsAndGradientsAreTheirs) {
  for (bool tied : {false, true}) {
    const auto model = seeded(tiny(tied));
    const auto tokens = some_tokens(), targets = some_tokens().roll(1, 1).clone();
    targets[0][3] = -100;
    const auto loss = model->forward(tokens, targets).loss;
    EXPECT_EQ(loss.count, 21);
    loss.sum.backward();
    std::vector<at::Tensor> grads;
    for (auto& p : model->parameters()) grads.push_back(p.grad().clone());
    model->zero_grad();
    const auto logits = model->forward(tokens).logits;
    const auto want = at::nll_loss(at::log_softmax(logits, -1).view({-1, 29}), targets.view(-1), {},
                                   at::Reduction::Sum, -100);
    EXPECT_NEAR(loss.sum.item<float>(), want.item<float>(), 1e-3);
    want.backward();
    size_t i = 0;
    for (auto& p : model->parameters()) EXPECT_TRUE(at::allclose(grads[i++], p.grad(), 1e-3, 1e-4));
  }
}

TEST(Llama, TiedHeadIsOneTensor) {
  const auto model = seeded(tiny(true));
  EXPECT_TRUE(model->lm_head->weight.is_same(model->model->embed_tokens->weight));
  const auto untied = seeded(tiny(false));
  EXPECT_FALSE(at::equal(untied->lm_head->weight, untied->model->embed_tokens->weight));
}

TEST(Llama, Bf16FollowsFp32) {
  const auto tokens = some_tokens();
  const auto exact = seeded(tiny()), rounded = seeded(tiny(), at::kBFloat16);
  const auto want = exact->forward(tokens, tokens).loss.sum,
             got = rounded->forward(tokens, tokens).loss.sum;
  EXPECT_NEAR(got.item<float>() / want.item<float>(), 1, 0.02);
  want.backward(), got.backward();
  for (size_t i = 0; i < exact->parameters().size(); ++i) {
    const auto a = exact->parameters()[i].grad(), b = rounded->parameters()[i].grad();
    EXPECT_EQ(b.scalar_type(), at::kBFloat16);
    EXPECT_LT((a - b.to(at::kFloat)).norm().item<float>() / a.norm().item<float>(), 0.06);
  }
}

// The tables of angles are no parameters or buffers: a cast model turns by the same fp32 angles.
TEST(Llama, CastModelKeepsFp32Angles) {
  const auto model = seeded(tiny());
  model->to(at::kBFloat16);
  EXPECT_EQ(model->buffers().size(), 0u);
  const auto direct = seeded(tiny(), at::kBFloat16);
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(
      at::equal(model->forward(some_tokens()).logits, direct->forward(some_tokens()).logits));
}

TEST(Llama, MetaThenMaterialized) {
  for (bool tied : {false, true}) {
    Llama model(tiny(tied), at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
    EXPECT_THROW(model.reset_parameters(3), StateError);
    ops::materialize(model, at::kCPU);
    model.reset_parameters(3);
    const auto want = seeded(tiny(tied), at::kBFloat16);
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE(
        at::equal(model.forward(some_tokens()).logits, want->forward(some_tokens()).logits));
    EXPECT_EQ(model.lm_head->weight.is_same(model.model->embed_tokens->weight), tied);
  }
}

TEST(Llama, RecomputedLayersGiveTheSameBits) {
  const auto model = seeded(tiny());
  std::vector<std::vector<at::Tensor>> found;
  for (bool on : {false, true}) {
    for (auto& layer : model->model->layers) layer->set_recompute(on);
    model->zero_grad();
    model->forward(some_tokens(), some_tokens()).loss.sum.backward();
    found.emplace_back();
    for (auto& p : model->parameters()) found.back().push_back(p.grad().clone());
  }
  for (size_t i = 0; i < found[0].size(); ++i)
    EXPECT_TRUE(at::equal(found[0][i], found[1][i])) << i;
}

TEST(Llama, EdgesOfShapes) {
  const auto model = seeded(tiny());
  const auto one = some_tokens(1, 1);
  EXPECT_EQ(model->forward(one).logits.sizes(), at::IntArrayRef({1, 1, 29}));
  EXPECT_EQ(model->forward(some_tokens(1, 16)).logits.size(1), 16);
  EXPECT_TRUE(
      has(message_of<ConfigError>([&] { model->forward(some_tokens(1, 17)); }), "sequence of 17"));
  EXPECT_THROW(model->forward(one[0]), ConfigError);
  EXPECT_TRUE(has(message_of<ConfigError>([&] { model->forward(one + 29); }), "outside [0, 29)"));
}

TEST(Weights, RoundTripAndConversion) {
  for (bool tied : {false, true}) {
    const Folder folder;
    const auto model = seeded(tiny(tied));
    save_pretrained(*model, folder.path());
    EXPECT_EQ(load_config(folder.path()), tiny(tied));
    for (auto type : {at::kFloat, at::kBFloat16}) {
      const auto copy = seeded(tiny(tied), type, 99);
      load_weights(*copy, folder.path());
      for (const auto& item : copy->named_parameters())
        EXPECT_TRUE(at::equal(item.value(), model->named_parameters()[item.key()].to(type)))
            << item.key();
    }
  }
}

TEST(Weights, EveryDifferenceIsNamedAndNothingChanged) {
  const Folder folder;
  auto larger = tiny();
  larger.vocab_size = 31, larger.num_hidden_layers = 3;
  save_weights(*seeded(larger), folder / "model.safetensors");
  const auto model = seeded(tiny());
  const auto before = model->model->norm->weight.clone();
  const auto text = message_of<FileError>([&] { load_weights(*model, folder.path()); });
  EXPECT_TRUE(has(text, "model.embed_tokens.weight: wanted [29, 24], got [31, 24]")) << text;
  EXPECT_TRUE(has(text, "unexpected: model.layers.2.mlp.up_proj.weight")) << text;
  save_weights(*seeded(tiny(true)), folder / "model.safetensors");
  EXPECT_TRUE(has(message_of<FileError>([&] { load_weights(*model, folder.path()); }),
                  "missing: lm_head.weight"));
  EXPECT_TRUE(at::equal(model->model->norm->weight, before));
}

TEST(Registry, BuildsByNameAndNamesWhatIsWrong) {
  const nlohmann::json options = {{"hidden_size", 24},
                                  {"num_attention_heads", 4},
                                  {"vocab_size", 29},
                                  {"num_hidden_layers", 1}};
  const auto model = build_model("llama", options);
  model->reset_parameters(1);
  EXPECT_EQ(model->vocabulary(), 29);
  EXPECT_EQ(model->context(), 2048);
  EXPECT_EQ(model->logits(some_tokens()).size(2), 29);
  EXPECT_EQ(model->loss(some_tokens(), some_tokens()).count, 22);
  EXPECT_TRUE(has(message_of<ConfigError>([&] { build_model("gpt", options); }),
                  "unknown model gpt; there are llama"));
  const auto wrong = [&](const char* key, const nlohmann::json& value) {
    auto o = options;
    o[key] = value;
    return message_of<ConfigError>([&] { build_model("llama", o); });
  };
  EXPECT_TRUE(has(wrong("hidden", 3), "unknown model option hidden"));
  EXPECT_TRUE(has(wrong("hidden_size", "x"), "hidden_size: wanted an integer, got \"x\""));
  EXPECT_TRUE(has(wrong("num_key_value_heads", 3),
                  "num_key_value_heads 3 does not divide num_attention_heads 4"));
  EXPECT_TRUE(
      has(wrong("hidden_size", 26), "num_attention_heads 4 does not divide hidden_size 26"));
  EXPECT_TRUE(has(wrong("vocab_size", 0), "vocab_size: wanted a positive number, got 0"));
}

TEST(Registry, SpecsNameEveryParameterOnce) {
  for (bool tied : {false, true}) {
    LanguageModel model(tiny(tied));
    const auto specs = model.specs();
    EXPECT_EQ(specs.size(), 3u + 2 * 9 - tied);
    for (const auto& spec : specs) {
      const bool is_norm = has(spec.name, "norm");
      const bool is_table = has(spec.name, "embed") || has(spec.name, "lm_head");
      EXPECT_EQ(spec.kind, is_norm    ? ParamKind::vector
                           : is_table ? ParamKind::embedding
                                      : ParamKind::matrix)
          << spec.name;
      EXPECT_EQ(spec.heads, has(spec.name, "q_proj") || has(spec.name, "o_proj")   ? 4
                            : has(spec.name, "k_proj") || has(spec.name, "v_proj") ? 2
                                                                                   : 0);
      EXPECT_EQ(spec.heads_dim, has(spec.name, "o_proj") ? 1 : 0);
    }
  }
}

TEST(Registry, Flops) {
  LanguageModel model(tiny());
  const double weights = 2 * (24 * 24 * 2 + 24 * 12 * 2 + 3 * 24 * 40) + 24 * 29;
  EXPECT_DOUBLE_EQ(model.flops_per_token(10), 6 * weights + 6 * 2 * 24 * 10);
}

TEST(Sample, SeededAndLimited) {
  LanguageModel model(tiny());
  model.reset_parameters(1);
  const std::vector<int64_t> prompt = {1, 2, 3};
  const auto greedy = sample(model, prompt, 20, {.temperature = 0});
  EXPECT_EQ(greedy.size(), 20u);  // past the context of 16
  const torch::NoGradGuard no_grad;
  EXPECT_EQ(greedy[0],
            model.logits(torch::tensor({{1, 2, 3}}, at::kLong))[0][2].argmax().item<int64_t>());
  EXPECT_EQ(sample(model, prompt, 20, {.top_k = 1, .seed = 4}), greedy);
  const auto a = sample(model, prompt, 20, {.seed = 4});
  EXPECT_EQ(a, sample(model, prompt, 20, {.seed = 4}));
  EXPECT_NE(a, sample(model, prompt, 20, {.seed = 5}));
  EXPECT_THROW(sample(model, {}, 1), ConfigError);
  EXPECT_THROW(sample(model, prompt, 1, {.temperature = -1}), ConfigError);
  EXPECT_THROW(sample(model, {29}, 1), ConfigError);
}

// The distribution of the first drawn token over seeds is the softmax's, cut to the top k and
// renormalised.
TEST(Sample, DrawsFromTheSoftmax) {
  LanguageModel model(tiny());
  model.reset_parameters(1);
  const torch::NoGradGuard no_grad;
  const auto logits = model.logits(torch::tensor({{5}}, at::kLong))[0][0];
  const auto [values, places] = logits.topk(4);
  const auto p = (values / 0.7).softmax(0);
  std::map<int64_t, int> counts;
  const int draws = 2000;
  for (int seed = 0; seed < draws; ++seed)
    ++counts[sample(model, {5}, 1,
                    {.temperature = 0.7, .top_k = 4, .seed = static_cast<uint64_t>(seed)})[0]];
  EXPECT_LE(counts.size(), 4u);
  for (int64_t i = 0; i < 4; ++i) {
    const double want = p[i].item<double>();
    EXPECT_NEAR(counts[places[i].item<int64_t>()] / double{draws}, want,
                5 * std::sqrt(want * (1 - want) / draws));
  }
}

TEST(Sample, Bytes) {
  EXPECT_EQ(tokens_of_bytes("a\xff"), (std::vector<int64_t>{97, 255}));
  EXPECT_EQ(bytes_of_tokens({97, 255, 0}), std::string("a\xff\0", 3));
  EXPECT_THROW(bytes_of_tokens({256}), ConfigError);
}

}  // namespace
}  // namespace dovetail::models

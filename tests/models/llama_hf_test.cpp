// Logits against Hugging Face's LlamaForCausalLM, with weights going both ways.
#include <torch/torch.h>

#include <cstdlib>

#include "dovetail/models/common/safetensors.h"
#include "dovetail/models/lm/weights.h"
#include "folder.h"

namespace dovetail::models {
namespace {

const std::string kPython = DOVETAIL_SOURCE_DIR "/.venv/bin/python";

bool run_python(const std::string& arguments) {
  const std::string quiet = " HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error ";
  return std::system(("env" + quiet + kPython + " " + arguments + " >/dev/null 2>&1").c_str()) == 0;
}

bool script(const std::string& arguments) {
  return run_python(DOVETAIL_SOURCE_DIR "/tests/models/hf_logits.py " + arguments);
}

double difference(const at::Tensor& got, const at::Tensor& want) {
  return ((got - want).abs().max() / want.abs().max()).item<double>();
}

// Their weights and logits against ours.
void expect_theirs_loads(const std::filesystem::path& folder) {
  const SafetensorsFile expected(folder / "expected.safetensors");
  ops::Unit<LlamaForCausalLM> model(load_config(folder));
  EXPECT_EQ(model.config().rope_theta, 5000.0);
  load_weights(model, folder);
  const torch::NoGradGuard no_grad;
  EXPECT_LT(difference(model.forward(expected.tensor("tokens")).logits, expected.tensor("logits")),
            1e-5);
}

TEST(HuggingFace, LogitsAgreeBothWays) {
  if (!run_python(
          "-c 'import importlib.util as u, sys; sys.exit(not (u.find_spec(\"transformers\") and "
          "u.find_spec(\"safetensors\")))'"))
    GTEST_SKIP() << "transformers is not installed in .venv: see requirements-test.txt";
  const std::vector<std::string> shapes = {"plain", "grouped_tied", "one_kv_head"};
  const Folder theirs, ours;
  ASSERT_TRUE(script("make " + theirs.path().string()));
  std::vector<at::Tensor> logits;
  const torch::NoGradGuard no_grad;
  for (const std::string& shape : shapes) {
    SCOPED_TRACE(shape);
    expect_theirs_loads(theirs / shape);
    const LlamaConfig config = load_config(theirs / shape);
    EXPECT_EQ(config.tie_word_embeddings, shape == "grouped_tied");
    EXPECT_EQ(config.num_key_value_heads, shape == "plain" ? 4 : shape == "grouped_tied" ? 2 : 1);

    ops::Unit<LlamaForCausalLM> model(config);
    model.reset_parameters(5);
    save_pretrained(model, ours / shape);
    const at::Tensor tokens = torch::randint(0, config.vocab_size, {3, 29}, at::kLong);
    write_safetensors(ours / (shape + "/tokens.safetensors"), {{"tokens", tokens}});
    logits.push_back(model.forward(tokens).logits);
  }
  ASSERT_TRUE(script("run " + ours.path().string()));
  for (size_t i = 0; i < shapes.size(); ++i)
    EXPECT_LT(
        difference(logits[i],
                   SafetensorsFile(ours / (shapes[i] + "/theirs.safetensors")).tensor("logits")),
        1e-5)
        << shapes[i];
}

}  // namespace
}  // namespace dovetail::models

"""The Hugging Face side of llama_hf_test.cpp.

  hf_logits.py make ROOT   a folder for each of SHAPES: a random model, tokens and their logits
  hf_logits.py run ROOT    loads the model in each folder, writes the logits of its tokens
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {"plain": (4, 4, False), "grouped_tied": (6, 2, True), "one_kv_head": (4, 1, False)}


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits.float().contiguous()


def make(folder, heads, kv_heads, tied):
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=101, max_position_embeddings=64, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=tied,
        initializer_range=0.2)).float().eval()
    with torch.no_grad():  # norms that differ from 1
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokens = torch.randint(0, 101, (2, 37))
    save_file({"tokens": tokens, "logits": logits_of(model, tokens)}, folder / "expected.safetensors")


def run(folder):
    model, report = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    wrong = {k: v for k, v in report.items() if v}
    assert not wrong, wrong
    tokens = load_file(folder / "tokens.safetensors")["tokens"]
    save_file({"logits": logits_of(model.eval(), tokens)}, folder / "theirs.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    command, root = sys.argv[1], Path(sys.argv[2])
    for name, shape in SHAPES.items():
        make(root / name, *shape) if command == "make" else run(root / name)

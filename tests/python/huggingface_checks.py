"""Models of transformers, built from small configurations: the same losses and weights as with torch's fully_shard."""

import torch
import transformers

from common import full
from comparison import Case, on_every_path, tokens

transformers.logging.set_verbosity_error()
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 32}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=64, num_hidden_layers=3, **SIZES))


def gpt2():  # head and embedding share their weight
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        intermediate_size=48, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, **SIZES))


def case(make, blocks, **more) -> Case:
    return Case(make, tokens(96, 2, 16), lambda model, x: model(input_ids=x, labels=x, use_cache=False).loss, blocks,
                **more)


def without_bias_of_keys(name, weight):
    """Softmax takes it away: its gradient is nothing but rounding, of which Adam makes whole steps (1e-4 to 0.4)."""
    if not name.endswith("c_attn.bias"):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat((query, value))


def check_llama(world):
    model = on_every_path(case(llama, lambda m: list(m.model.layers)), world.rank).model
    # Generation gathers unit by unit and gives the same tokens as one process.
    single = llama()
    single.load_state_dict({n: full(p.detach()) for n, p in model.state_dict().items()})
    prompt = torch.arange(5).view(1, 5)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(model.generate(prompt, **how), single.generate(prompt, **how))


def check_gpt2(world):
    on_every_path(case(gpt2, lambda m: list(m.transformer.h), compared=without_bias_of_keys), world.rank)


def check_mixtral(world):
    on_every_path(case(mixtral, lambda m: list(m.model.layers)), world.rank)

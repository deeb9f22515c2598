"""Models of transformers, built from small configurations: the same losses and weights as with torch's fully_shard."""

import torch
import transformers
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import full
from dovetail import fully_shard

transformers.logging.set_verbosity_error()


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32))


def gpt2():  # head and embedding share their weight
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32))


def blocks_of(model):
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


def train(make, shard, rank, steps=10):
    torch.manual_seed(11)
    model = make()
    model.train()
    for block in blocks_of(model):
        shard(block)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(100 * step + rank))
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def compare(make, rank):
    ours, losses = train(make, fully_shard, rank)
    theirs, expected = train(make, torch_fully_shard, rank)
    for a, b in zip(losses, expected):
        assert abs(a - b) <= 1e-5 * abs(b), (losses, expected)
    others = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        q = full(others[name].detach())
        difference = (full(p.detach()) - q).norm() / q.norm().clamp_min(1e-6)
        assert difference <= 1e-5, (name, float(difference))
    return ours


def check_llama(world):
    model = compare(llama, world.rank)
    # Generation gathers unit by unit and gives the same tokens as one process.
    single = llama()
    single.load_state_dict({n: full(p.detach()) for n, p in model.state_dict().items()})
    prompt = torch.arange(5).view(1, 5)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        assert torch.equal(model.generate(prompt, **how), single.generate(prompt, **how))


def check_gpt2(world):
    compare(gpt2, world.rank)


def check_mixtral(world):
    compare(mixtral, world.rank)

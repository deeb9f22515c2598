"""GPT-2 of transformers, trained from scratch with dovetail.fully_shard and torch's own AdamW.

    python examples/python/gpt2.py
    torchrun --nproc_per_node=2 examples/python/gpt2.py --format bf16 --save /tmp/gpt2
"""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import training
from dovetail import fully_shard


def build(sequence: int) -> GPT2LMHeadModel:
    # Tokens are bytes, and none of them ends a text. The head shares its weight with the embedding.
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_positions=max(sequence, 128), n_embd=128, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None))
    model.loss_type = "ForCausalLM"  # which transformers, warning of it, takes in any case
    return model


def main() -> None:
    args = training.options(__doc__.splitlines()[0], sequence=128)
    training.start()
    model = build(args.sequence)
    for block in model.transformer.h:
        fully_shard(block, format=args.format)
    fully_shard(model, format=args.format)

    # Groups are made after fully_shard, which puts sharded parameters into the model.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": vectors, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.95))

    training.train_on_text(model, optimizer, args)
    training.save(args.save, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

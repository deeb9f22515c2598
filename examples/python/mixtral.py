"""Mixtral of transformers, trained from scratch with dovetail.fully_shard and Dovetail's fused AdamW.

    python examples/python/mixtral.py
    torchrun --nproc_per_node=2 examples/python/mixtral.py --format bf16 --save /tmp/mixtral
"""

import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import dovetail
import training
from dovetail import fully_shard


def build(sequence: int) -> MixtralForCausalLM:
    # Tokens are bytes, and none of them ends a text. Two of four experts see each byte.
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=max(sequence, 128), bos_token_id=None, eos_token_id=None))


def main() -> None:
    args = training.options(__doc__.splitlines()[0], sequence=128)
    training.start()
    model = build(args.sequence)
    for layer in model.model.layers:
        fully_shard(layer, format=args.format)
    fully_shard(model, format=args.format)
    optimizer = dovetail.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

    training.train_on_text(model, optimizer, args)
    training.save(args.save, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

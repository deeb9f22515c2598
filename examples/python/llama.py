"""Llama of transformers, trained from scratch with dovetail.fully_shard, a plan for Muon, and Muon.

    python examples/python/llama.py
    torchrun --nproc_per_node=2 examples/python/llama.py --format bf16 --save /tmp/llama
"""

import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import dovetail
import training
from dovetail import Plan, fully_shard


def build(sequence: int) -> LlamaForCausalLM:
    # Tokens are bytes, and none of them ends a text.
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max(sequence, 128), bos_token_id=None, eos_token_id=None))


def main() -> None:
    args = training.options(__doc__.splitlines()[0], sequence=128)
    training.start()
    model = build(args.sequence)
    # Muon orthogonalises whole matrices: where no shard cuts one, none has to be put together for it.
    plan = Plan(block="matrix")
    for layer in model.model.layers:
        fully_shard(layer, plan=plan, format=args.format)
    fully_shard(model, plan=plan, format=args.format)
    optimizer = dovetail.optim.Muon(model.parameters(), lr=2e-2, weight_decay=0.1)

    training.train_on_text(model, optimizer, args)
    training.save(args.save, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

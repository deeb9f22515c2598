"""A script for torch's fully_shard that runs on Dovetail with its import changed.

    torchrun --nproc-per-node 2 examples/python/fsdp2_swap.py            # Dovetail
    torchrun --nproc-per-node 2 examples/python/fsdp2_swap.py --torch    # torch's own

Trains a small decoder on the source text of Python's standard library, byte by byte, and prints the loss.
"""

import os
import sys
import sysconfig

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

if "--torch" in sys.argv:
    from torch.distributed.fsdp import fully_shard
else:
    from dovetail import fully_shard


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for t in self.qkv(self.before_attention(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class Decoder(nn.Module):
    def __init__(self, width=128, heads=4, depth=3, length=128):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(steps=40):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    folder = sysconfig.get_paths()["stdlib"]
    names = sorted(n for n in os.listdir(folder) if n.endswith(".py"))[:40]
    text = torch.frombuffer(bytearray(b"".join(open(os.path.join(folder, n), "rb").read() for n in names)),
                            dtype=torch.uint8).long()
    torch.manual_seed(0)  # the same weights on every rank
    model = Decoder()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        at = torch.randint(0, len(text) - 129, (8,), generator=generator)
        rows = torch.stack([text[i:i + 129] for i in at])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step + 1:3}  loss {mean.item() / dist.get_world_size():.4f}  "
                      f"gradient norm {float(norm.full_tensor()):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""torch.compile of the units of a model, before and after fully_shard."""

import os

import torch

import ranks
from dovetail import fully_shard
from training_checks import llama, same, tokens, weights


def compile_in_place(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compile_as_modules(model):
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")


def check_compiled_blocks(world):
    """The same bits as without: "aot_eager" runs the kernels of eager mode. Each block is one graph.

    "inductor" does the same to 1e-7, but its kernels take half a minute to compile.
    """
    def train(shard, before=None, after=None):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = llama(shard, before, after)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            loss = model(tokens(world.rank, step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses += [loss.item(), model(tokens(world.rank, 9)).square().mean().item()]
        counters = torch._dynamo.utils.counters
        assert not counters["graph_break"], counters["graph_break"]
        graphs = counters["stats"]["unique_graphs"]
        assert graphs == (2 if before or after else 0), graphs  # with and without gradients, one code for all blocks
        return losses, {name.replace("_orig_mod.", ""): w for name, w in weights(model).items()}

    expected = train(fully_shard)
    for how in ({"before": compile_in_place}, {"after": compile_as_modules}):
        losses, got = train(fully_shard, **how)
        assert losses == expected[0], how
        same(got, expected[1], rtol=0, atol=0)


LATE = """
import sys, torch, torch.nn as nn, torch.distributed as dist
import dovetail

rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 35)
        self.down = nn.Linear(35, 32, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def train(compiled):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(32, 64, bias=False))
    for block in blocks:
        dovetail.fully_shard(block)
    dovetail.fully_shard(model)
    optimizer = dovetail.optim.AdamW(model.parameters(), lr=1e-2)
    if compiled:
        for block in blocks:
            block.compile(backend="aot_eager")
    losses = []
    for step in range(3):
        loss = model(torch.full((4, 32), 0.1 * (rank + 1))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.state_dict()
    assert {type(p).__name__ for p in model.parameters()} == {"DTensor", "ShardedTensor"}
    return losses


plain = train(compiled=False)
assert "torch._dynamo" not in sys.modules
assert train(compiled=True) == plain  # the hooks are older than the compiler
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
dovetail.close_worlds()
dist.destroy_process_group()
"""


def check_the_compiler_is_loaded_by_those_who_compile(world):
    """torch's optimizers and DTensors load it to keep it off: 30 MiB in every rank."""
    ranks.alone(LATE, world.rank, world.size, os.path.join(world.folder, "compiler"))

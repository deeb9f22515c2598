"""torch.compile of the units of a model, before and after fully_shard."""

import torch

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

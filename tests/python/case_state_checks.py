"""Cases from the field about weighted losses, 8-bit state and initial state; beside each, what torch's own does."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     set_model_state_dict)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import expect_error, full, what_torch_does
from dovetail import Plan, fully_shard, optim
from dovetail.ragged import from_full
from ragged_checkpoint_checks import Part


# B12: a loss that is weighted by tokens, over ranks and micro-batches of different sizes.

class Weight(nn.Module):
    """A loss of w * g per token."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5]))

    def forward(self, slopes):
        return (self.w * slopes).sum()


SLOPES = ([1.0], [2.0], [5.0, 5.0, 5.0], [])


def check_b12(world):
    mine = [SLOPES[i] for i in range(4) if i * world.size // 4 == world.rank]
    tokens = torch.tensor(float(sum(map(len, mine))))
    dist.all_reduce(tokens)

    def run(shard, share, accumulate, factor=None):
        model = shard(Weight())
        if factor:
            model.set_gradient_divide_factor(factor)
        split = share if accumulate else [sum(share, [])]
        loss = torch.zeros(())
        for i, slopes in enumerate(split):
            model.set_requires_gradient_sync(i == len(split) - 1)
            part = model(torch.tensor(slopes)) / tokens.clamp_min(1)
            (part * (1 if factor else world.size)).backward()  # without a factor gradients are the mean over ranks
            loss += part.detach()
        dist.all_reduce(loss)
        return full(model.w.grad).item(), loss.item()

    for how in ((fully_shard, 1.0), (fully_shard,), (torch_fully_shard,)):
        for accumulate in (False, True):
            gradient, loss = run(how[0], mine, accumulate, *how[1:])
            assert abs(gradient - 3.6) <= 1e-6 and abs(loss - 1.8) <= 1e-6, (how, accumulate, gradient, loss)
            assert run(how[0], [[] for _ in mine], accumulate, *how[1:]) == (0.0, 0.0)
    if world.size > 1:  # torch's divides in the reduction, which Gloo has not
        assert "Gloo" in what_torch_does(lambda: run(torch_fully_shard, mine, False, 1.0))


# B14: 8-bit state, whichever way parameters are cut. Torch has no 8-bit optimizer of its own to compare with.

SHAPES = ((6, 1024), (3, 1024), (4100,), (1, 4096))


class Parameters(nn.Module):
    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(2)
        self.tensors = nn.ParameterList(torch.randn(s, generator=g) for s in SHAPES)

    def forward(self):
        return sum(t.sum() for t in self.tensors)


def check_b14(world):
    def run(make, mesh):
        model = fully_shard(Parameters(), mesh=mesh, plan=Plan(alignment=256))
        opt = make(model.parameters(), lr=0.1)
        for step in range(2):
            model().backward()
            for i, p in enumerate(model.parameters()):  # equal gradients, however many ranks sum them up
                g = torch.Generator().manual_seed(10 * step + i)
                p.grad = from_full(torch.randn(SHAPES[i], generator=g), p)
            opt.step()
        return [full(p.detach()) for p in model.parameters()]

    expected = None
    for size in range(1, world.size + 1):
        part = Part(world, size)
        if part.member:
            ours = run(optim.AdamW8bit, part.mesh)
            expected = expected or ours
            in_fp32 = run(optim.AdamW, part.mesh)
            for shape, a, b, c in zip(SHAPES, ours, expected, in_fp32):
                torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{shape} on {size} ranks")
                assert torch.equal(a, c) == (shape == (3, 1024)), (shape, size)
        dist.barrier()


# B22: buffers of a model that was made on the meta device.

class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("frequencies", torch.empty(4), persistent=False)
        self.register_buffer("period", torch.empty((), dtype=torch.int64), persistent=False)
        self.reset_buffers()

    def reset_buffers(self):
        self.frequencies.copy_(10.0 ** (-torch.arange(4) / 4))
        self.period.fill_(3)

    def forward(self, x):
        return self.linear(x) * self.frequencies.to(x.dtype) + self.period


def check_b22(world):
    torch.manual_seed(5)
    source = Rotary()
    weights = source.state_dict()
    x = torch.randn(2, 4)
    expected = source.bfloat16()(x.bfloat16())
    source.reset_buffers()

    def late(shard, **how):
        with torch.device("meta"):
            model = Rotary()
        shard(model, **how)
        return model

    model = late(fully_shard, format="bf16")
    expect_error(RuntimeError, ["meta"], lambda: model(x))
    model.to_empty(device="cpu")
    load = StateDictOptions(full_state_dict=True)
    expect_error(RuntimeError, ["linear.weight", "frequencies", "period"], lambda: model(x))
    set_model_state_dict(model, dict(weights), options=load)  # torch exchanges its entries
    expect_error(RuntimeError, ["since: frequencies, period."], lambda: model(x))
    model.reset_buffers()
    torch.testing.assert_close(model(x), expected, rtol=1e-2, atol=1e-2)  # the order of bf16 sums
    assert model.frequencies.dtype == torch.float32 and model.period.item() == 3
    torch.testing.assert_close(model.frequencies, torch.tensor([1, 0.56234, 0.31623, 0.17783]), rtol=1e-4, atol=0)
    # A buffer that is left on the meta device while the rest is loaded.
    model = fully_shard(Rotary())
    model.frequencies = torch.empty(4, device="meta")
    expect_error(RuntimeError, ["frequencies", "meta"], lambda: model(x))
    # Torch's takes whatever the memory holds.
    theirs = late(torch_fully_shard)
    theirs.to_empty(device="cpu")
    set_model_state_dict(theirs, dict(weights), options=load)
    theirs(x)


def check_b22_statistics_of_batch_norm(world):
    """Each rank has its own; a checkpoint holds those of the first rank, given the planner that says so."""
    def make(shard):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(world.rank)))
        return shard(model)

    for shard in (fully_shard, torch_fully_shard):
        model = make(shard)
        mine = model[1].running_mean.clone()
        assert world.size == 1 or not torch.equal(mine, world.everyone(mine)[world.rank - 1])
        for attempt in range(2):
            folder = f"{world.folder}/norm-{shard.__module__}-{attempt}"
            dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder,
                     planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
            read = {"model": {"1.running_mean": torch.zeros(4)}}
            dcp.load(read, checkpoint_id=folder)
            assert torch.equal(read["model"]["1.running_mean"], world.everyone(mine)[0])
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(whole["1.running_mean"], mine)

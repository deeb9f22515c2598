"""Cases from the field about losses, states and checkpoints; beside each, what torch's own fully_shard does."""

import logging
import pathlib
import shutil
import struct

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict,
                                                     set_model_state_dict)
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import expect_error, full, what_torch_does
from dovetail import FileError, Plan, fully_shard, optim
from dovetail.checkpoint import load_checkpoint, save_checkpoint
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


# B20: checkpoints that are damaged on disk. fault_test.py has those that are broken off.

def check_b20(world):
    """All damages are found before anything is changed, on all ranks; the checkpoint before is taken instead."""
    def make(seed):
        torch.manual_seed(seed)
        model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(model, opt)
        return model, opt

    def step(model, opt):
        model(torch.ones(2, 8)).square().sum().backward()
        opt.step()
        opt.zero_grad()

    def held(model, opt):
        return [full(t.detach()).clone() for p in model.parameters() for t in (p, opt.state[p]["exp_avg"])]

    good = pathlib.Path(world.folder, "good-own")
    model, opt = make(1)
    first = save_checkpoint(model, opt, good)
    expected = held(model, opt)
    step(model, opt)
    newest = pathlib.Path(save_checkpoint(model, opt, good)).name
    weight = full(model[1].weight.detach())[-1, -1].item()
    for damage in ("manifest", "half", "bit"):
        bad = good.with_name(f"{damage}-own")
        if world.rank == 0:
            shutil.copytree(good, bad)
            spoil(bad / newest, "*.bin", damage, weight)
        dist.barrier()
        model, opt = make(2)
        before = held(model, opt)
        expect_error(FileError, [newest] if damage == "manifest" else [newest, ".bin"],
                     lambda: load_checkpoint(model, opt, bad / newest))
        assert all(torch.equal(a, b) for a, b in zip(held(model, opt), before)), damage
        loaded = load_checkpoint(model, opt, bad)
        assert loaded.step == 1 and newest in "".join(loaded.passed_over), loaded
        assert all(torch.equal(a, b) for a, b in zip(held(model, opt), expected)), damage
    with torch.no_grad():
        model[0].bias.fill_(torch.inf)
    expect_error(FileError, ["0.bias"], lambda: save_checkpoint(model, opt, good, step=9))
    dist.barrier()
    assert sorted(f.name for f in good.iterdir()) == [pathlib.Path(first).name, newest]


def spoil(folder, files, damage, weight):
    """Removes the manifest, or cuts the file that holds `weight` in half, or turns one of its bits over."""
    if damage == "manifest":
        next(f for f in folder.iterdir() if f.name in ("manifest.json", ".metadata")).unlink()
        return
    pattern = struct.pack("<f", weight)
    file = next(f for f in folder.glob(files) if pattern in f.read_bytes())
    content = bytearray(file.read_bytes())
    content[content.index(pattern)] ^= 1
    file.write_bytes(content[:len(content) // 2] if damage == "half" else content)


def check_b20_torchs_format(world):
    """What torch.distributed.checkpoint finds, and finds too late, is the same for both."""
    for shard in (fully_shard, torch_fully_shard):
        found = {damage: damaged(world, shard, damage) for damage in ("manifest", "half", "bit")}
        # Without metadata nothing is read.
        assert ".metadata" in found["manifest"][0] and not found["manifest"][1], found
        # The other files are read before the half one is found: weights have changed, and no file is named. It takes a
        # good checkpoint to go on from, which damaged() does.
        assert found["half"][0] and found["half"][1], found
        # A bit turned over is not found at all.
        assert found["bit"][0] == "", found


def damaged(world, shard, damage):
    """What loading says on this rank, "" for nothing, and whether weights were changed."""
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        shard(model[0])
        return shard(model)

    good, bad = (pathlib.Path(world.folder, f"{name}-{damage}-{shard.__module__}") for name in ("good", "bad"))
    source = make(1)
    weights = [full(p.detach()).clone() for p in source.parameters()]
    dcp.save({"model": get_model_state_dict(source)}, checkpoint_id=good)
    if world.rank == 0:
        shutil.copytree(good, bad)
        spoil(bad, "*.distcp", damage, weights[2][-1, -1].item())
    dist.barrier()
    model = make(2)
    before = [full(p.detach()).clone() for p in model.parameters()]
    state = get_model_state_dict(model)
    logging.disable(logging.WARNING)  # torch's own account of missing files
    try:
        dcp.load({"model": state}, checkpoint_id=bad)
        said = ""
    except dcp.api.CheckpointException as e:
        said = str(e)
    logging.disable(logging.NOTSET)
    assert len({bool(s) for s in world.everyone(said)}) == 1, said  # all ranks agree
    now = [full(p.detach()).clone() for p in model.parameters()]
    changed = not all(torch.equal(a, b) for a, b in zip(before, now))
    dcp.load({"model": state}, checkpoint_id=good)
    model.load_state_dict(state)
    for p, w in zip(model.parameters(), weights):
        assert torch.equal(full(p.detach()), w)
    if damage == "bit":
        assert not torch.equal(now[2], weights[2])
    return said, changed


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

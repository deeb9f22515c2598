"""Backward passes that throw, beside torch's own fully_shard with passes that do not; forward passes inside of them."""

import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import dovetail
import models
from common import expect_error, full
from dovetail import fully_shard


class Trap(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Trap.on:
            raise ValueError("trap")
        return grad


class Trapped(nn.Module):
    """Throws in backward between two of its units while Trap.on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.second(Trap.apply(self.first(x).tanh())))


def both(make, **how):
    """The same model under torch and under dovetail, with an optimizer each."""
    torch.manual_seed(8)
    model = make()
    pair = []
    for shard in (torch_fully_shard, fully_shard):
        m = copy.deepcopy(model)
        for part in m.layers if isinstance(m, models.Mlp) else (m.first, m.second):
            shard(part, **(how if shard is fully_shard else {}))
        shard(m, **(how if shard is fully_shard else {}))
        pair.append((m, torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)))
    return pair


def own_batch(step, shape=(4, 6)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def expect_same(theirs, mine, kind="parameters"):
    for (name, t), p in zip(theirs.named_parameters(), mine.parameters()):
        if kind == "grad":
            t, p = t.grad, p.grad
            assert (t is None) == (p is None), name
            if t is None:
                continue
        torch.testing.assert_close(full(p), full(t), rtol=1e-5, atol=1e-6, msg=lambda s, name=name: f"{name}: {s}")


def throws(model, step):
    loss = model(own_batch(step)).square().sum()
    Trap.on = True
    try:
        expect_error(ValueError, ["trap"], loss.backward)
    finally:
        Trap.on = False


def check_training_goes_on_after_a_backward_that_threw(world):
    for how in ({}, {"reshard_after_forward": False}, {"comm": "c10d"}):
        pair = both(Trapped, **how)
        for step in range(4):
            for model, optimizer in pair:
                if step % 2 and model is pair[1][0]:
                    throws(model, step)
                    optimizer.zero_grad()
                if step == 3:
                    with torch.no_grad():
                        model(own_batch(step))
                model(own_batch(step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            expect_same(pair[0][0], pair[1][0])


def check_every_call_may_come_next(world):
    (theirs, _), (mine, _) = both(Trapped)
    for call in ("unshard", "reshard", "state_dict", "eval"):
        throws(mine, 1)
        mine.zero_grad()
        if call == "eval":
            with torch.no_grad():
                torch.testing.assert_close(mine(own_batch(2)), theirs(own_batch(2)))
        else:
            getattr(mine, call)()
        mine.reshard()
        expect_same(theirs, mine)
    optimizer = dovetail.optim.AdamW(mine.parameters(), lr=1e-2)
    throws(mine, 1)
    mine.zero_grad()
    optimizer.step()  # without gradients
    expect_same(theirs, mine)


def check_the_same_graph_may_go_back_again(world):
    pair = both(Trapped)
    for model, optimizer in pair:
        loss = model(own_batch(3)).square().sum()
        if model is pair[1][0]:
            Trap.on = True
            expect_error(ValueError, ["trap"], lambda: loss.backward(retain_graph=True))
            Trap.on = False
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    expect_same(pair[0][0], pair[1][0], "grad")
    expect_same(pair[0][0], pair[1][0])


def check_the_root_may_be_a_checkpoint(world):
    for reentrant in (False, True):
        for how in ({}, {"reshard_after_forward": False}, {"comm": "c10d"}):
            pair = both(models.Mlp, **how)
            for step in range(3):
                losses = []
                for model, optimizer in pair:
                    x = own_batch(step, (4, 32)).requires_grad_()
                    loss = checkpoint(model, x, use_reentrant=reentrant).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append([loss.detach(), x.grad])
                torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
                expect_same(pair[0][0], pair[1][0])

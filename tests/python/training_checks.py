"""Training as scripts have it: scaled losses, micro-batches, schedules, averages; beside torch's own."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import models
from common import expect_error, full, what_torch_does
from dovetail import fully_shard, optim


def tokens(rank, step):
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def llama(shard, before=None, after=None):
    torch.manual_seed(3)
    model = models.Llama()
    for prepare in (before, lambda m: [shard(b) for b in m.blocks], shard, after):
        if prepare:
            prepare(model)
    return model


def weights(model):
    return {n: full(p.detach()).clone() for n, p in model.named_parameters()}


def same(a, b, **bound):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m: f"{name}: {m}", **bound)


# torch.amp.GradScaler.

def check_gradient_scaler(world):
    """With clipping; a gradient that is not finite on one rank makes all ranks leave the step out."""
    def train(shard, make):
        model = llama(shard)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        norms = []
        for step in range(5):
            before = weights(model)
            loss = model(tokens(world.rank, step)).square().mean()
            if step == 2 and world.rank == world.size - 1:
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norms.append(full(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            skipped = all(torch.equal(w, before[n]) for n, w in weights(model).items())
            assert skipped == (step == 2), step
            assert world.everyone(scaler.get_scale()) == [512.0 if step >= 2 else 1024.0] * world.size
        return norms[:2] + norms[3:], weights(model)

    def adamw(params):
        return torch.optim.AdamW(params, lr=1e-3)

    ours, theirs = train(fully_shard, adamw), train(torch_fully_shard, adamw)
    assert all(abs(a - b) <= 5e-6 * b for a, b in zip(ours[0], theirs[0])), (ours[0], theirs[0])
    same(ours[1], theirs[1], rtol=1e-4, atol=1e-6)  # Adam makes more of a norm's last bit
    engine = train(fully_shard, lambda p: optim.AdamW(p, lr=1e-3))
    same(engine[1], theirs[1], rtol=1e-4, atol=1e-6)


# Micro-batches, with an evaluation between them, and schedules of the learning rate.

def check_accumulation_evaluation_and_schedules(world):
    def train(shard, ranks=(world.rank,), synchronous=False, make=torch.optim.SGD, evaluates=True):
        model = llama(shard or (lambda m: m))
        optimizer = make(model.parameters(), lr=0.1)
        schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2),
                     torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, [2])
        seen = []
        for step in range(4):
            for micro in range(3):
                if shard:
                    model.set_requires_gradient_sync(synchronous or micro == 2)
                for rank in ranks:
                    (model(tokens(rank, 3 * step + micro)).square().mean() / (3 * len(ranks))).backward()
                if evaluates:
                    model.eval()
                    with torch.no_grad():
                        seen.append(model(tokens(0, 50)).square().mean().item())
                    model.train()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return seen, weights(model)

    # The order of sums over micro-batches and ranks, and matrix products of one batch at a time: roundings.
    bound = {"rtol": 1e-5, "atol": 1e-7}
    seen, expected = train(None, range(world.size))
    for how in ({}, {"synchronous": True}, {"make": optim.SGD}):
        ours = train(fully_shard, **how)
        assert all(abs(a - b) <= 1e-6 * b for a, b in zip(ours[0], seen)), (how, ours[0], seen)
        same(ours[1], expected, **bound)
    same(train(torch_fully_shard, evaluates=False)[1], expected, **bound)
    # After a forward without gradients the root of torch's stays gathered and does not see the next step.
    theirs = train(torch_fully_shard)[0]
    assert any(abs(a - b) > 5e-6 * b for a, b in zip(theirs, seen)), (theirs, seen)


# Averages of weights.

def check_averaged_model(world):
    """AveragedModel copies: refused for what is sharded, right for a copy that is sharded as well."""
    model = llama(fully_shard)
    expect_error(RuntimeError, ["copied", "before fully_shard"], lambda: AveragedModel(model))
    theirs = llama(torch_fully_shard)
    assert "FSDP does not support deepcopy" in what_torch_does(lambda: AveragedModel(theirs))

    def train(shard, ranks):
        torch.manual_seed(3)
        model = models.Llama()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for m in (model, average.module) if shard else ():
            for block in m.blocks:
                shard(block)
            shard(m)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            sum(model(tokens(r, step)).square().mean() / len(ranks) for r in ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        with torch.no_grad():
            return average(tokens(world.rank, 9)), weights(average.module)

    alone, ours = train(None, range(world.size)), train(fully_shard, [world.rank])
    torch.testing.assert_close(ours[0], alone[0], rtol=1e-5, atol=1e-6)
    same(ours[1], alone[1], rtol=1e-5, atol=1e-7)

"""Gradients in users' hands: hooks, kept and assigned ones; beside torch's own."""

import gc
from unittest import mock

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import expect_error, full
from dovetail import fully_shard, optim


def layers(shard, of_root=(), **how):
    """Three units and a root, without parameters or with those of the layers in `of_root`."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 3))
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Linear) and i not in of_root:
            shard(layer, **how)
    return shard(model, **how)


def batch(world, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + world.rank))


def loss(model, world, step):
    return model(batch(world, step)).square().mean()


def values(model, of=lambda p: p.detach()):
    return {n: full(of(p)).clone() if of(p) is not None else None for n, p in model.named_parameters()}


def gradients(model):
    return values(model, lambda p: p.grad)


def same(a, b, what=""):
    assert a.keys() == b.keys(), what
    for name in a:
        assert (a[name] is None) == (b[name] is None), (what, name, a[name], b[name])
        if a[name] is not None:
            torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-7, msg=lambda m: f"{what} {name}: {m}")


COMMS = ("auto", "c10d")


def everywhere(run):
    """run(shard, **how) of torch's fully_shard and of this over both transports: equal."""
    theirs = run(torch_fully_shard)
    for comm in COMMS:
        same(run(fully_shard, comm=comm), theirs, comm)


# Hooks.

def check_hooks_are_called_when_gradients_are_there(world):
    def run(shard, **how):
        model, called, seen = layers(shard, **how), [], {}
        handles = {}
        for name, p in model.named_parameters():
            def second(q, name=name, p=p):
                assert q is p and q.grad is not None and not torch.is_grad_enabled()
                called.append((name, "second"))
                seen[f"{name} {sum(c == (name, 'second') for c in called)}"] = q.grad.full_tensor().clone()
            handles[name] = p.register_post_accumulate_grad_hook(lambda q, name=name: called.append((name, "first")))
            p.register_post_accumulate_grad_hook(second)
        for step, sync in enumerate((True, False, True, True)):
            model.set_requires_gradient_sync(sync)
            loss(model, world, step).backward()
            called.append(step)
            if step == 2:
                for handle in handles.values():
                    handle.remove()
        calls.append([[c for c in called if isinstance(c, int) or c[0] == name] for name in handles])
        return seen

    calls = []
    everywhere(run)
    assert all(c == calls[0] for c in calls), calls
    assert calls[0][0] == [("0.weight", "first"), ("0.weight", "second"), 0, 1, ("0.weight", "first"),
                           ("0.weight", "second"), 2, ("0.weight", "second"), 3], calls[0][0]


def check_optimizers_in_backward(world):
    for make in (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW([p], lr=0.01)):
        for syncs in ((True,), (False, True)):
            def run(shard, **how):
                model = layers(shard, of_root=(2,), **how)
                before = values(model)
                optimizers = {p: make(p) for p in model.parameters()}

                def update(p):
                    optimizers[p].step()
                    optimizers[p].zero_grad()
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(update)
                for step in range(6):
                    model.set_requires_gradient_sync(syncs[step % len(syncs)])
                    loss(model, world, step).backward()
                    assert all(p.grad is None for p in model.parameters())
                after = values(model)
                assert not any(torch.equal(after[n], before[n]) for n in after)
                return after
            everywhere(run)


def check_optimizers_of_the_engine_in_backward_are_refused(world):
    model = layers(fully_shard)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = model[0].bias.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    expect_error(RuntimeError, ["SGD.step", "register_post_accumulate_grad_hook", "after backward()"],
                 lambda: loss(model, world, 0).backward())
    handle.remove()
    optimizer.step()
    model[0].bias.register_post_accumulate_grad_hook(lambda p: optim.SGD([p], lr=0.1).step())
    expect_error(RuntimeError, ["SGD.step", "each parameter"], lambda: loss(model, world, 0).backward())


def check_a_hook_that_raises(world):
    """The error is the caller's, and all gradients are there."""
    def run(shard, **how):
        model = layers(shard, **how)

        def broken(p):
            raise KeyError("broken")
        handle = model[0].bias.register_post_accumulate_grad_hook(broken)
        expect_error(KeyError, ["broken"], lambda: loss(model, world, 0).backward())
        handle.remove()
        return model

    model = run(fully_shard)
    plain = layers(fully_shard)
    loss(plain, world, 0).backward()
    same(gradients(model), gradients(plain))
    loss(model, world, 1).backward()
    loss(plain, world, 1).backward()
    same(gradients(model), gradients(plain))


# Gradients that users keep.

KEPT = {"the gradient": lambda p: p.grad, "its elements": lambda p: p.grad.to_local(),
        "detached": lambda p: p.grad.detach(), "a part": lambda p: p.grad.to_local().view(-1)[:3],
        "bits": lambda p: p.grad.to_local().view(torch.int32)}


def check_kept_gradients_stay(world):
    """Whichever way they are kept, and whenever they are dropped from parameters."""
    for what, how in KEPT.items():
        for grad_mode in (True, False):
            for late in (False, True):  # dropped between forward and backward
                for shard in (torch_fully_shard, fully_shard):
                    model = layers(shard, of_root=(2,))
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                    loss(model, world, 0).backward()
                    with torch.set_grad_enabled(grad_mode):
                        kept = [how(p) for p in model.parameters()]
                    before = [full(t).clone() for t in kept]
                    optimizer.step()
                    if not late:
                        optimizer.zero_grad()
                    out = loss(model, world, 1)
                    optimizer.zero_grad()
                    out.backward()
                    where = (what, grad_mode, late, shard.__module__)
                    assert all(torch.equal(full(t), b) for t, b in zip(kept, before)), where
                    assert all((full(p.grad) != 0).any() for p in model.parameters()), where


def check_kept_gradients_outlive_steps_of_the_engine(world):
    model = layers(fully_shard)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    loss(model, world, 0).backward()
    kept = [p.grad for p in model.parameters()]
    before = [full(t).clone() for t in kept]
    optimizer.step()
    with torch.no_grad():
        model[0](batch(world, 0))  # a unit alone
    assert all(torch.equal(full(t), b) for t, b in zip(kept, before))
    loss(model, world, 1).backward()
    optimizer.step()
    loss(model, world, 2).backward()
    assert all(torch.equal(full(t), b) for t, b in zip(kept, before))
    # One of many, on one rank alone.
    mine = model[0].weight.grad.to_local() if world.rank == 0 else torch.zeros(0)
    before = mine.clone()
    model.zero_grad()
    loss(model, world, 3).backward()
    assert torch.equal(mine, before)


def check_gradients_that_nobody_keeps_are_not_copied(world):
    model = layers(fully_shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    def train(steps):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, world, step).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for p in model.parameters():
                p.grad.mul_(0.5)
                p.grad.to_local().mul_(0.5)
            optimizer.step()

    with mock.patch.object(gc, "get_objects", side_effect=AssertionError("looked for views")):
        train(2)
        objects = [id(p.grad) for p in model.parameters()]
        train(3)
        assert [id(p.grad) for p in model.parameters()] == objects
        # Those that add up are the same object.
        kept = [p.grad for p in model.parameters()]
        loss(model, world, 7).backward()
        assert all(p.grad is g for p, g in zip(model.parameters(), kept))


# Gradients that users assign.

def check_assigned_gradients_count(world):
    """Before the first forward, between forward and backward, after a step, and of what a pass does not use."""
    def run(shard, **how):
        found = {}

        def assign(model):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.full_like(p, 10.0 + i)

        model = layers(shard, **how)
        assign(model)
        loss(model, world, 0).backward()
        found |= {f"first {n}": g for n, g in gradients(model).items()}
        model.zero_grad()
        out = loss(model, world, 1)
        assign(model)
        out.backward()
        found |= {f"between {n}": g for n, g in gradients(model).items()}
        loss(model, world, 2).backward()
        found |= {f"added {n}": g for n, g in gradients(model).items()}
        model[2].weight.grad = None
        model[0].weight.grad = model[0].weight.grad.detach() * 2
        model[4].weight.grad = model[4].weight.grad.detach()
        loss(model, world, 3).backward()
        found |= {f"some {n}": g for n, g in gradients(model).items()}
        model.zero_grad()
        assign(model)
        model.set_requires_gradient_sync(False)
        loss(model, world, 4).backward()
        found |= {f"without communication {n}": g for n, g in gradients(model).items()}
        model.set_requires_gradient_sync(True)
        loss(model, world, 5).backward()
        return found | {f"with {n}": g for n, g in gradients(model).items()}

    everywhere(run)

    class Skips(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    def unused(shard, **how):
        torch.manual_seed(2)
        model = Skips(nn.Linear(5, 5), nn.Linear(5, 5))
        for layer in model:
            shard(layer, **how)
        shard(model, **how)
        for _ in range(2):
            model[1].weight.grad = torch.ones_like(model[1].weight)
            loss(model, world, 0).backward()
        return gradients(model)

    everywhere(unused)
    model = Skips(nn.Linear(5, 5), nn.Linear(5, 5))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    model[1].weight.grad = torch.ones_like(model[1].weight)
    loss(model, world, 0).backward()
    expect_error(RuntimeError, ["1.weight", "no backward pass"], optimizer.step)


def check_assigned_gradients_after_a_step_of_the_engine(world):
    def run(shard, make):
        model = layers(shard)
        optimizer = make(model.parameters(), lr=0.1)
        for step in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.1 * (step + 1))
            loss(model, world, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    same(run(fully_shard, optim.SGD), run(torch_fully_shard, torch.optim.SGD))

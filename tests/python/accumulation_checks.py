"""Backward passes that add up: with calls between them, without communication, divided by factors; beside torch's."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import expect_error, what_torch_does
from dovetail import Plan, fully_shard, optim
from gradient_checks import COMMS, everywhere, gradients, layers, loss, same, values


# Calls while there are gradients.

def late_prefetch(model):
    model.set_modules_to_forward_prefetch([model[0], model[2], model[4]])
    model.set_modules_to_backward_prefetch([model[4], model[2]])


CALLS = {
    "without communication": lambda m: m.set_requires_gradient_sync(False),
    "reshard_after_forward": lambda m: m.set_reshard_after_forward(False),
    "prefetch": late_prefetch,
    "all": lambda m: (m.set_reshard_after_forward(False), late_prefetch(m), m.set_requires_gradient_sync(False)),
}


def check_calls_between_backward_passes(world):
    for what, call in CALLS.items():
        for to_none in (True, False):
            def run(shard, **how):
                model, found = layers(shard, **how), {}
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step in range(6):
                    loss(model, world, step).backward()
                    if step == 2:
                        call(model)
                    if step == 3:
                        model.set_requires_gradient_sync(True)
                    if step % 2:
                        optimizer.step()
                        found |= {f"{step} {n}": g for n, g in gradients(model).items()}
                        optimizer.zero_grad(set_to_none=to_none)
                return found | values(model)

            everywhere(run)


def check_gradients_without_communication_stay_until_it(world):
    """Also over a step and zero_grad(), which know nothing of them, and a call that makes the engine anew."""
    T, F = True, False
    mesh = init_device_mesh("cpu", (world.size,))
    plans = {"": {}, "gradients whole": {"plan": Plan(zero2=1)}, "all whole": {"plan": Plan(zero1=1)}}
    for syncs in ((F, T, F), (T, F, F), (F, F, T), (T, F, T)):
        for anew in (False, True):
            def run(shard, **how):
                model, found = layers(shard, mesh=mesh, **how), {}
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for step, sync in enumerate(syncs * 2 + (T,)):
                    model.set_requires_gradient_sync(sync)
                    loss(model, world, step).backward()
                    found |= {f"{step} {n}": g for n, g in gradients(model).items()}
                    if step % 3 == 2:
                        if anew and step == 2:
                            model.set_reshard_after_forward(False)
                        optimizer.step()
                        optimizer.zero_grad()
                return found | values(model)

            theirs = run(torch_fully_shard)
            for what, how in plans.items():
                same(run(fully_shard, **how), theirs, (syncs, anew, what))


def check_sums_over_replicas_stay_until_all_are_summed(world):
    T, F = True, False
    shards = max(1, world.size // 2)
    mesh = init_device_mesh("cpu", (world.size // shards, shards), mesh_dim_names=("replicas", "shards"))
    plans = {"": {}, "over both": {"plan": Plan(zero1=world.size)}}
    for alls in ((T, F, T), (F, F, T), (F, T, F)):
        def run(shard, **how):
            model, found = layers(shard, mesh=mesh, **how), {}
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step, sums in enumerate(alls * 2 + (T,)):
                model.set_requires_all_reduce(sums)
                loss(model, world, step).backward()
                found |= {f"{step} {n}": g for n, g in gradients(model).items()}
                if step % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            return found | values(model)

        theirs = run(torch_fully_shard)
        for what, how in plans.items():
            same(run(fully_shard, **how), theirs, (alls, what))


def check_the_first_pass_without_communication_is_announced_in_time(world):
    model = layers(fully_shard)
    out = loss(model, world, 0)
    model.set_requires_gradient_sync(False)
    if world.size > 1:
        expect_error(RuntimeError, ["set_requires_gradient_sync(False)", "before the forward"], out.backward)
    # Optimizers of the engine step on what one pass with communication has left.
    model = layers(fully_shard)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loss(model, world, 0).backward()
    model.set_requires_gradient_sync(False)
    optimizer.step()
    plain = layers(torch_fully_shard)
    loss(plain, world, 0).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    same(values(model), values(plain))
    model.set_requires_gradient_sync(True)
    loss(model, world, 1).backward()
    model.set_requires_gradient_sync(False)
    loss(model, world, 2).backward()
    if world.size > 1:
        expect_error(RuntimeError, ["SGD.step", "without communication"], optimizer.step)
    model.set_requires_gradient_sync(True)
    loss(model, world, 3).backward()
    optimizer.step()


def check_divide_factors_of_units(world):
    """Each unit has its own, from the next backward pass on; torch's has them in reductions that Gloo lacks."""
    def run(shard, factors, of_root=(), calls=(), **how):
        model = layers(shard, of_root, **how)
        for step, factor in enumerate(factors):
            for i in calls if factor else ():
                (model if i is None else model[i]).set_gradient_divide_factor(factor)
            model.set_requires_gradient_sync(step != 2)
            loss(model, world, step).backward()
        return gradients(model)

    # A root without parameters of its own: nothing changes.
    same(run(fully_shard, (None, 3.0, None, 5.0), calls=[None]), run(torch_fully_shard, (None,) * 4))
    if world.size > 1:
        assert "Gloo" in what_torch_does(lambda: run(torch_fully_shard, (3.0,), calls=[0]))
    passes = []
    model = layers(fully_shard)
    for step in range(4):
        model.zero_grad()
        loss(model, world, step).backward()
        passes.append(gradients(model))
    n = world.size
    for of_root, calls, names in (((), [0], ("0.weight", "0.bias")), ((2,), [None], ("2.weight",)),
                                  ((), [0, 2, 4, None], tuple(passes[0]))):
        for comm in COMMS:
            # Without communication in the third pass: its gradient is divided with the fourth.
            found = run(fully_shard, (None, 3.0, None, 5.0), of_root, calls, comm=comm)
            for name, g in found.items():
                by = (n, 3, 5, 5) if name in names else (n,) * 4
                wanted = sum(p[name] * n / d for p, d in zip(passes, by))
                torch.testing.assert_close(g, wanted, rtol=1e-5, atol=1e-7)
    expect_error(ValueError, ["factor", "-1"], lambda: model[0].set_gradient_divide_factor(-1.0))


def check_more_steps_after_a_model_was_moved(world):
    """Memory exchanged under parameters while gradients of a pass without communication wait."""
    def run(shard, moves=True, **how):
        model = layers(shard, **how)
        for step, sync in enumerate((True, False, True)):
            model.set_requires_gradient_sync(sync)
            loss(model, world, step).backward()
            if moves:
                model._apply(lambda t: t.clone())
        return gradients(model)

    same(run(fully_shard), run(torch_fully_shard, moves=False))

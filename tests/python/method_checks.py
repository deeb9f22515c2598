"""Methods of torch's FSDPModule: each is there, and does what torch's does or says what to use instead."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule as TorchModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dovetail
from common import expect_error, full
from dovetail import fully_shard, optim

X = torch.ones(2, 4)
REFUSED = {  # with what the error must name
    "set_all_reduce_hook": ((lambda t: None,), "set_requires_all_reduce"),
    "set_custom_all_gather": ((None,), "comm="),
    "set_custom_reduce_scatter": ((None,), "comm="),
    "set_allocate_memory_from_process_group_for_comm": ((True,), "comm="),
    "set_symm_mem_for_comm": ((), "comm="),
    "set_post_optim_event": ((None,), "leave"),
    "set_reduce_scatter_max_input_buffers": ((2,), "pending_reductions"),
    "set_separate_reduce_scatter_group": ((), "leave"),
}


class Fails(torch.autograd.Function):
    on = False

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        if Fails.on:
            raise ValueError("broken off")
        return grad


class Either(nn.Module):
    """One of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, chosen):
        return self.layers[chosen](x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Either() for _ in range(3))

    def forward(self, x, chosen=0):
        for i, layer in enumerate(self.layers):
            x = layer(Fails.apply(x) if i == 1 else x, chosen)
        return x


def sharded(shard=fully_shard, **how):
    torch.manual_seed(5)
    model = Model()
    for layer in model.layers[:2]:
        shard(layer, **how)
    return shard(model, **how)


def gradients(model, x=X, **how):
    model.zero_grad()
    model(x, **how).square().sum().backward()
    return [None if p.grad is None else full(p.grad).clone() for p in model.parameters()]


def check_every_method_of_torch_is_there(world):
    theirs = {name for name in dir(TorchModule) if not name.startswith("_")}
    ours = {name for name in dir(dovetail.FSDPModule) if not name.startswith("_")}
    assert theirs - ours == set() and set(REFUSED) <= theirs, theirs - ours
    model = sharded()
    assert not isinstance(model, TorchModule)
    for name, (arguments, word) in REFUSED.items():
        expect_error(NotImplementedError, [name, word], lambda: getattr(model, name)(*arguments))
        expect_error(NotImplementedError, [name, word], lambda: getattr(model.layers[0], name)(*arguments))
    expect_error(NotImplementedError, ["set_unshard_in_backward", "reshard_after_forward"],
                 lambda: model.layers[0].set_unshard_in_backward(False))
    gradients(model)


def check_what_is_accepted_does_as_torch_does(world):
    x = X + world.rank
    for name, how in (("set_reduce_scatter_divide_factor", (4.0,)), ("set_force_sum_reduction_for_comms", (True,)),
                      ("set_unshard_in_backward", (True,)), ("set_reduce_scatter_unused_params", (True,))):
        for comm in ("c10d", "peer"):
            models = sharded(comm=comm), sharded(torch_fully_shard)
            for m in models:
                for u in [m, *m.layers[:2]]:  # Gloo has no factors in its sums
                    u.set_force_sum_reduction_for_comms(True)
                    getattr(u, name)(*how)
            # All layers are used by some rank.
            chosen = world.rank % 2 if name == "set_reduce_scatter_unused_params" else 0
            for ours, theirs in zip(*(gradients(m, x, chosen=chosen) for m in models)):
                torch.testing.assert_close(ours, theirs)


def check_reset_after_a_pass_that_raised(world):
    x = X + world.rank
    for comm in ("c10d", "peer"):
        for make in (torch.optim.AdamW, optim.AdamW):
            models = [sharded(comm=comm), sharded(comm=comm)]
            optimizers = [make(m.parameters(), lr=0.1) for m in models]

            def step():
                for m, o in zip(models, optimizers):
                    m(x).square().sum().backward()
                    o.step()
                    o.zero_grad()

            step()
            for broken in ("backward", "forward", None):
                Fails.on = broken == "backward"
                if broken:
                    expect_error((ValueError, RuntimeError), [],
                                 lambda: models[0](x if Fails.on else x[:, :1]).square().sum().backward())
                Fails.on = False
                models[0].reset_iter_state()
                assert all(p.grad is None for p in models[0].parameters())
                step()
                for p, q in zip(*(m.parameters() for m in models)):
                    assert torch.equal(full(p), full(q)), broken
            expect_error(NotImplementedError, ["reset_iter_state", "root"], models[0].layers[0].reset_iter_state)


def check_switches_in_a_loop_over_all_modules(world):
    """As scripts turn them: on each unit, the root first. Below it only what stands so already is taken."""
    def summed(shard):
        model = sharded(shard, mesh=world.mesh)
        for step, last in enumerate((False, True)):
            for m in model.modules():
                if isinstance(m, (dovetail.FSDPModule, TorchModule)):
                    m.set_requires_gradient_sync(last)
                    m.set_requires_all_reduce(True)
                    m.set_reshard_after_backward(True)
                    m.set_is_last_backward(last)
            model(X + world.rank + step).square().sum().backward()
        return [None if p.grad is None else full(p.grad) for p in model.parameters()]

    for ours, theirs in zip(summed(fully_shard), summed(torch_fully_shard), strict=True):
        torch.testing.assert_close(ours, theirs)
    model = sharded(mesh=world.mesh)
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward"):
        expect_error(NotImplementedError, [name, "root"], lambda: getattr(model.layers[0], name)(False))
    for name in ("set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward",
                 "set_reshard_after_forward", "set_is_last_backward"):
        for value in ("no", None, 1):
            expect_error(ValueError, [name, "bool"], lambda: getattr(model, name)(value))
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        expect_error(ValueError, [name, "list"], lambda: getattr(model, name)(model.layers[0]))
    gradients(model)

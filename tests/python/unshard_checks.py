"""Forwards that raise, unshard and reshard, transforms that are refused: which parameters modules have then."""

import itertools

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from common import expect_error, full
from dovetail import fully_shard
from gathered_checks import COMMS, X, are_sharded, half, stack, stack_parameters, step_once


# Failures.

class Broken(Exception):
    pass


def breaks(module):
    raise Broken


def check_a_forward_that_raised(world):
    for comm, how, at, reshards in itertools.product(COMMS, ({}, half(fully_shard)), range(3), (None, False)):
        model, reference = stack(comm=comm, reshards=reshards, **how), stack(comm=comm, **how)
        x = X + world.rank
        for _ in range(2):
            model[at].act = breaks
            for call in (model, torch.no_grad()(model)):
                expect_error(Broken, [], lambda: call(x))
                assert are_sharded(model.parameters()) and are_sharded(model.state_dict().values())
                assert not any(u.gathered for u in model._unit().runtime.units)
            if at < 2:  # a block alone
                expect_error(Broken, [], lambda: model[at](x))
                assert are_sharded(model.parameters())
            model[at].act = None
            losses = []
            for m in (model, reference):
                optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
                losses.append(m(x).square().sum())
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses), losses
    # One that the forward above deals with.
    for comm in COMMS:
        model = stack(comm=comm)

        class Tries(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = model[0]
                self.last = nn.Linear(4, 4)

            def forward(self, x):
                self.inner.act = breaks
                try:
                    self.inner(x)
                except Broken:
                    assert isinstance(self.inner.weight, DTensor)
                self.inner.act = None
                return self.last(self.inner(x))

        tries = fully_shard(Tries(), comm=comm)
        for _ in range(2):
            tries(X).sum().backward()
            assert all(p.grad is not None for p in tries.parameters())
            tries.zero_grad()


def check_a_forward_where_an_exception_is_handled(world):
    for comm in COMMS:
        model = stack(comm=comm)
        model(X).square().sum().backward()
        wanted = [full(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
        try:
            raise Broken
        except Broken:
            loss = model(X).square().sum()
            assert are_sharded(model.parameters())
            loss.backward()
            model[1].act = breaks
            expect_error(Broken, [], lambda: model(X))
        assert all(torch.equal(full(p.grad), w) for p, w in zip(model.parameters(), wanted))


# unshard and reshard.

def check_unshard_before_the_first_forward(world):
    for comm in COMMS:
        for at in (None, 0):
            model = stack(comm=comm)
            wanted = {k: full(v) for k, v in model.state_dict().items()}
            unit = model if at is None else model[at]
            unit.reshard()
            unit.unshard()
            weight = (model[2] if at is None else unit).weight
            assert torch.equal(weight.detach(), wanted["2.weight" if at is None else "0.weight"])
            assert not isinstance(weight, DTensor)
            unit.reshard()
            assert are_sharded(model.parameters())
            step_once(model)
            assert model._unit().runtime is model[1]._unit().runtime
    model = stack()
    expect_error(NotImplementedError, ["root"], lambda: model[0].set_requires_all_reduce(False))
    step_once(model)


def check_unshard_between_forward_and_backward(world):
    for comm, how, reshards in itertools.product(COMMS, ({}, half(fully_shard)), (None, False)):
        model = stack(comm=comm, reshards=reshards, **how)
        x = X + world.rank
        model(x).square().sum().backward()
        wanted = [full(p.grad).clone() for p in model.parameters()]
        for units in ([model], [model[0], model], [model[1]], [model[0], model[1], model]):
            for reshard in (True, False):
                model.zero_grad()
                loss = model(x).square().sum()
                with torch.no_grad():
                    for m in units:
                        m.unshard()
                        whole = (model[2] if m is model else m).weight
                        assert not isinstance(whole, DTensor)
                        wanted_weight = full(stack_parameters(model)[2 if m is model else [*model].index(m)])
                        torch.testing.assert_close(whole.float(), wanted_weight, rtol=1e-2, atol=0)
                if reshard:
                    for m in units:
                        m.reshard()
                    assert are_sharded(model.parameters())
                loss.backward()
                for p, w in zip(model.parameters(), wanted):
                    assert torch.equal(full(p.grad), w)
                assert are_sharded(model.parameters())
        # Values that were written since.
        model.zero_grad()
        model(x)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(3.0)
        for m, at in ((model, 2), (model[0], 0)):
            m.unshard()
            assert (model[at].weight == 3.0).all()
            m.reshard()
        # While all stay gathered.
        model.set_reshard_after_backward(False)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(2.0)
        model.unshard()
        model[0].unshard()
        assert all((model[at].weight == 2.0).all() for at in (0, 2)) and isinstance(model[1].weight, DTensor)
        model.reshard()
        assert isinstance(model[2].weight, DTensor) and not isinstance(model[0].weight, DTensor)
        model[0].reshard()
        step_once(model)


def check_unshard_while_a_graph_waits(world):
    for comm in COMMS:
        model = stack(comm=comm)
        x = X.clone().requires_grad_()
        results = []
        for unshards in (False, True):
            g, = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            if unshards:
                model.unshard()
            g.square().sum().backward()
            results.append([full(p.grad).clone() for p in model.parameters()])
            model.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*results))


# Transforms.

def check_transforms_are_refused(world):
    for comm, ran in itertools.product(COMMS, (False, True)):
        model, reference = stack(comm=comm), stack(comm=comm)
        if ran:
            step_once(model)
        for call in (lambda: torch.func.grad(lambda y: model(y).sum())(X), lambda: torch.func.vjp(model, X),
                     lambda: torch.func.jvp(model, (X,), (X,)), lambda: torch.func.jacrev(model)(X),
                     lambda: torch.func.jacfwd(model)(X), lambda: torch.func.vmap(model)(X),
                     lambda: torch.func.grad(lambda y: model[0](y).sum())(X)):
            expect_error(NotImplementedError, ["torch.func", "backward()", "functional_call"], call)
        assert are_sharded(model.parameters()) and (ran or model._unit().runtime is None)
        for m in (model, reference):
            m(X).square().sum().backward()
        for p, q in zip(model.parameters(), reference.parameters()):
            assert torch.equal(full(p.grad), full(q.grad))

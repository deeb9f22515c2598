"""Mistakes that train something wrong without a word are named; what torch's own fully_shard says is beside each."""

import copy
import warnings

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import models
from common import expect_error, full, what_torch_does
from dovetail import fully_shard, optim
from dovetail._unit import unit_of
from dovetail.ragged import from_full

X = torch.ones(2, 32)


def sharded(shard, model):
    for layer in model.layers:
        shard(layer)
    return shard(model)


def said(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def check_optimizer_made_before(world):
    def train(shard, at_once):
        model = models.Mlp()
        optimizer = torch.optim.SGD(model.parameters() if not at_once else [model.scale], lr=0.1)
        sharded(shard, model)
        before = full(model.scale.detach()).clone()
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
        assert torch.equal(full(model.scale.detach()), before)

    count = len(list(models.Mlp().parameters()))
    for at_once, number in ((False, count), (True, 1)):
        messages = said(lambda: train(fully_shard, at_once))
        assert len(messages) == 1 and f"SGD: {number} of" in messages[0], messages  # once, not every step
    assert said(lambda: train(torch_fully_shard, False)) == []


def check_parameters_thawed_in_no_group(world):
    """torch's optimizers leave them; ours, which step the whole engine, say so and change nothing."""
    for make in (optim.SGD, optim.AdamW, optim.Muon):
        model = models.Mlp()
        sharded(fully_shard, model)
        frozen = model.layers[0]
        frozen.requires_grad_(False)
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        frozen.requires_grad_(True)
        before = [full(p.detach()).clone() for p in model.parameters()]
        model(X).square().sum().backward()
        expect_error(ValueError, [make.__name__, "layers.0", "no group", "requires_grad_(False)"], optimizer.step)
        assert all(torch.equal(full(p.detach()), was) for p, was in zip(model.parameters(), before, strict=True))
        frozen.requires_grad_(False)
        optimizer.step()
        stays = [torch.equal(full(p.detach()), was) for p, was in zip(model.parameters(), before, strict=True)]
        assert all(stay for p, stay in zip(model.parameters(), stays) if not p.requires_grad) and not all(stays)


def check_layers_added_after(world):
    def extended(shard, ignored=False):
        model = models.Mlp()
        late = nn.Linear(32, 32)
        if ignored:
            model.late = late
            for layer in model.layers:
                shard(layer)
            shard(model, ignored_params=set(late.parameters()))
        else:
            sharded(shard, model)
            model.late = late
        late(model(X)).sum().backward()

    messages = said(lambda: extended(fully_shard))
    assert len(messages) == 1 and "late.weight, late.bias" in messages[0], messages
    assert said(lambda: extended(fully_shard, ignored=True)) == []
    assert said(lambda: extended(torch_fully_shard)) == []
    # One that is sharded itself is right.
    model = models.Mlp()
    for layer in model.layers:
        fully_shard(layer)
    model.late = nn.Linear(32, 32)
    fully_shard(model.late)
    fully_shard(model)
    assert said(lambda: model(X)) == []


def check_whole_state_dicts(world):
    torch.manual_seed(world.rank)  # other values than the model's
    whole = models.Mlp().state_dict()
    whole = {name: world.everyone(t)[0] for name, t in whole.items()}
    model = sharded(fully_shard, models.Mlp())
    before = {n: full(p.detach()).clone() for n, p in model.named_parameters()}
    expect_error(TypeError, ["layers.0.0.weight", "(96, 32)", "set_model_state_dict", "full_state_dict"],
                 lambda: model.load_state_dict(whole))
    expect_error(TypeError, ["1.0.weight"], lambda: nn.Sequential(nn.Identity(), model.layers[0]).load_state_dict(
        {f"1.{name}": t for name, t in models.Mlp().layers[0].state_dict().items()}))
    for name, p in model.named_parameters():
        assert torch.equal(full(p.detach()), before[name]), name
    model.load_state_dict(model.state_dict())
    set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
    for name, p in model.named_parameters():
        assert torch.equal(full(p.detach()), whole[name]), name
    theirs = sharded(torch_fully_shard, models.Mlp())
    assert "set_model_state_dict" not in what_torch_does(lambda: theirs.load_state_dict(whole))


def check_assigned_state_dicts(world):
    """assign=True copies: parameters stay the ones that optimizer and engine have. On meta it gives them memory."""
    torch.manual_seed(8)
    whole = {name: world.everyone(t)[0] for name, t in models.Mlp().state_dict().items()}

    def theirs(placement):
        return {n: distribute_tensor(t, world.mesh, [placement]) for n, t in whole.items()}

    for device in ("cpu", "meta"):
        for given in ("own", "own parameters", "Shard(0)", "Replicate()"):
            with torch.device(device):
                model = sharded(fully_shard, models.Mlp())
            model.layers[0][0].bias.requires_grad_(False)
            model.scale.marked = True
            params = list(model.parameters())
            optimizer = optim.AdamW([p for p in params if p.requires_grad])
            if device == "cpu":
                model(X)
            if given.startswith("own"):
                state = {n: from_full(whole[n], p) for n, p in model.state_dict().items()}
                if given == "own parameters":
                    state = {n: nn.Parameter(t) for n, t in state.items()}
            else:
                state = theirs({"Shard(0)": Shard(0), "Replicate()": Replicate()}[given])
            objects = dict(state)
            missing = dict(list(state.items())[1:])
            assert model.load_state_dict(missing, assign=True, strict=False).missing_keys == list(state)[:1]
            model.load_state_dict(state, assign=True)
            assert all(state[n] is t for n, t in objects.items())  # the user's own dict is as it was
            assert all(p is q for p, q in zip(model.parameters(), params, strict=True))
            assert not model.layers[0][0].bias.requires_grad and model.norm.weight.requires_grad and model.scale.marked
            for name, p in model.named_parameters():
                assert torch.equal(full(p.detach()), whole[name]), name
                assert p._local_tensor.data_ptr() != state[name]._local_tensor.data_ptr() or p.to_local().numel() == 0
            model(X).sum().backward()
            optimizer.step()
            model(X)
    expect_error(TypeError, ["layers.0.0.weight", "(96, 32)", "full_state_dict"],
                 lambda: model.load_state_dict(whole, assign=True))
    expect_error(TypeError, ["norm.weight", "meta"], lambda: model.load_state_dict(
        {**state, "norm.weight": state["norm.weight"].to("meta")}, assign=True))
    expect_error(RuntimeError, ["norm.weight", "size mismatch"], lambda: model.load_state_dict(
        {**state, "norm.weight": distribute_tensor(torch.ones(4), world.mesh, [Shard(0)])}, assign=True))
    model(X).sum().backward()


def check_copies_of_parameters(world):
    """deepcopy of parameters, as averages of weights make it; a module is not copied."""
    stock = fully_shard(nn.Linear(64, world.size, bias=False))  # cut where Shard(0) cuts
    assert type(stock.weight) is DTensor
    for model, x in ((stock, torch.ones(2, 64)), (sharded(fully_shard, models.Mlp()), X)):
        copies_of_parameters(model, x)


def copies_of_parameters(model, x):
    first = next(model.parameters())
    for trained in (False, True):
        first.marked = "by the user"
        for p in model.parameters():
            twin = copy.deepcopy(p)
            assert type(twin) is type(p) and isinstance(twin, nn.Parameter) and twin.requires_grad
            assert unit_of(twin) is None and (twin.grad is None) == (not trained)
            assert torch.equal(full(twin.detach()), full(p.detach()))
            local = twin._local_tensor
            assert local.untyped_storage().nbytes() == local.nbytes  # not that of the whole unit
            if trained:
                assert torch.equal(full(twin.grad), full(p.grad))
                twin.grad.zero_()
                assert full(p.grad).any() or not full(twin.grad).any()
            before = full(p.detach()).clone()
            with torch.no_grad():
                twin.add_(1)
            assert torch.equal(full(p.detach()), before) and not torch.equal(full(twin.detach()), before)
        assert copy.deepcopy(first).marked == "by the user"
        twins = copy.deepcopy(list(model.parameters()) * 2)
        assert twins[0] is twins[len(twins) // 2] and len({id(t) for t in twins}) == len(twins) // 2
        for inner in (model, nn.Sequential(model)):
            expect_error(RuntimeError, ["cannot be copied"], lambda: copy.deepcopy(inner))
        model(x).square().sum().backward()
    average = copy.deepcopy(list(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    wanted = [torch.lerp(full(a.detach()), full(p.detach()), 0.25) for a, p in zip(average, model.parameters())]
    with torch.no_grad():
        torch._foreach_lerp_(average, list(model.parameters()), 0.25)
    for a, w in zip(average, wanted):
        torch.testing.assert_close(full(a.detach()), w)


def check_materialised_modules_train(world):
    """to_empty() exchanges what parameters have been marked with."""
    with torch.device("meta"):
        model = sharded(fully_shard, models.Mlp())
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.01)
    assert all(unit_of(p) is not None for p in model.parameters())
    optimizer = optim.AdamW(model.parameters())
    model(X).square().sum().backward()
    optimizer.step()
    copy.deepcopy(list(model.parameters()))

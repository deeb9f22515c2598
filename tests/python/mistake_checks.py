"""Mistakes that train something wrong without a word are named; what torch's own fully_shard says is beside each."""

import warnings

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import models
from common import expect_error, full, what_torch_does
from dovetail import fully_shard

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

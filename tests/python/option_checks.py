"""Options of optimizers that cannot be, groups that do not belong, steps that are skipped or fail on one rank."""

import os
import warnings

import torch
import torch.nn as nn

import dovetail
from common import expect_error, full
from dovetail import fully_shard, optim
from dovetail.checkpoint import load_checkpoint, save_checkpoint

X = torch.ones(2, 8)
NAN = float("nan")


def made():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[0])
    return fully_shard(model)


def backward(model):
    model(X).square().sum().backward()


WRONG = (
    (optim.AdamW, "lr", (-1, "x", NAN, float("inf"), None, True, torch.ones(2))),
    (optim.AdamW, "betas", (0.9, (2, 0.9), (0.9, -0.1), (0.9,), ("x", 0.9))),
    (optim.AdamW, "eps", (-1.0, 0.0, "x")),
    (optim.AdamW, "weight_decay", (-1.0, None)),
    (optim.AdamW8bit, "betas", ((0.9, 1.0),)),
    (optim.SGD, "momentum", (-0.1, 1.0, "x")),
    (optim.SGD, "dampening", (2, 0.5)),
    (optim.SGD, "nesterov", (True, 3)),
    (optim.Muon, "momentum", (1.5,)),
    (optim.Muon, "nesterov", ("yes",)),
    (optim.Muon, "unit", (3, "")),
    (optim.Shampoo, "epsilon", (0, 1)),
    (optim.Shampoo, "block", (0, 1.5, 32769)),
    (optim.Shampoo, "every", (0, 2.5)),
    (optim.Composed, "weight_decay", (-1,)),
    (optim.Composed, "optimizer", ("lion", [])),
)


def check_options_that_cannot_be(world):
    """Named where the optimizer is made, or at the step after they were changed; then nothing has changed."""
    model = made()
    for kind, name, values in WRONG:
        for value in values:
            words = [kind.__name__, "group 0", f"{name}: wanted", repr(value)]
            expect_error(ValueError, words[:3] if name == "nesterov" else words,
                         lambda: kind(model.parameters(), **{name: value}))
            opt = kind(model.parameters())
            opt.param_groups[0][name] = value
            backward(model)
            before = full(model[0].weight.detach()).clone()
            expect_error(ValueError, words[:3] if name == "nesterov" else words, opt.step)
            assert torch.equal(full(model[0].weight.detach()), before)
            model.zero_grad()
        expect_error(TypeError, ["unknown"], lambda: kind(model.parameters(), unknown=1))
    expect_error(ValueError, ["Operations", "lr", "-1"],
                 lambda: optim.Operations(model.parameters(), [optim.Operation()], lr=-1))
    expect_error(ValueError, ["Operations", "int"], lambda: optim.Operations(model.parameters(), 3))
    optim.AdamW(model.parameters(), lr=torch.tensor(0.1))  # torch's learning rates may be tensors


def check_groups_that_cannot_be(world):
    model, other = made(), made()
    params = list(model.parameters())
    for word, value in (("momentum", 0.1), ("weigth_decay", 0.1), ("beta", 0.9)):
        expect_error(ValueError, ["AdamW: group 0", "weight_decay", repr(word)],
                     lambda: optim.AdamW([{"params": params, word: value}]))
    optim.AdamW([{"params": params, "name": "all", "lr_scale": 0.5}])  # words of the user's own
    expect_error(ValueError, ["amsgrad", "True"], lambda: optim.AdamW([{"params": params, "amsgrad": True}]))
    expect_error(ValueError, ["group 1", "betas"],
                 lambda: optim.AdamW([{"params": params[:1], "betas": (0.1, 0.2)}, {"params": params[1:]}]))
    expect_error(ValueError, ["Composed: group 0", "momentum", "3"],
                 lambda: optim.Composed([{"params": params, "optimizer": "sgd", "momentum": 3}]))
    for given in (3, [{}], [{"params": 3}], [3]):
        expect_error(TypeError, [], lambda: optim.AdamW(given))
    plain = nn.Parameter(torch.zeros(2))
    opt = optim.AdamW(params)
    for bound in (False, True):
        for given in ([plain], plain, iter([plain]), [("name", plain)]):
            expect_error(ValueError, ["AdamW: group 1", "fully_shard", "(2,)"],
                         lambda: opt.add_param_group({"params": given}))
        expect_error(ValueError, ["AdamW: group 0", "fully_shard", "(2,)"], lambda: optim.AdamW([*params, plain]))
        if bound:
            expect_error(ValueError, ["AdamW: group 1", "one root"],
                         lambda: opt.add_param_group({"params": list(other.parameters())}))
        assert len(opt.param_groups) == 1
        backward(model)
        opt.step()
    # One of this root that was frozen may come in between steps.
    model = made()
    model[1].bias.requires_grad_(False)
    opt = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    backward(model)
    opt.step()
    before = full(model[1].bias.detach()).clone()
    model[1].bias.requires_grad_(True)
    opt.add_param_group({"params": model[1].bias, "lr": 0.2})
    backward(model)
    grad = full(model[1].bias.grad).clone()
    opt.step()
    torch.testing.assert_close(full(model[1].bias.detach()), before - 0.2 * grad)


def check_state_dicts_that_cannot_be(world):
    model = made()
    opt = optim.AdamW(model.parameters(), lr=0.5)
    for given in ({}, 3, {"state": {}}):
        expect_error(ValueError, ["load_state_dict", "param_groups"], lambda: opt.load_state_dict(given))
    backward(model)
    opt.step()
    for name, value in (("lr", -1.0), ("betas", 3), ("maximize", True)):
        state = opt.state_dict()
        state["param_groups"][0][name] = value
        expect_error(ValueError, [name, repr(value)], lambda: opt.load_state_dict(state))
        assert opt.param_groups[0]["lr"] == 0.5 and "maximize" not in opt.param_groups[0]


def check_skipped_steps_are_told(world):
    model = made()
    opt = optim.AdamW(model.parameters())
    backward(model)
    opt.step()
    before = full(model[0].weight.detach()).clone()

    def messages(times, value):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                backward(model)
                model[0].weight.grad.mul_(value)
                opt.step()
        return [(str(w.message), w.filename) for w in caught]

    seen = messages(5, NAN)
    assert len(seen) == 3, seen  # the first, second and fourth time
    assert all(w in seen[0][0] for w in ("AdamW", "step 2 ", "skipped", "nan")) and "4 times" in seen[2][0], seen
    assert all(file == __file__ for _, file in seen), seen
    assert opt.skipped == 5 and opt.last.skipped
    assert torch.equal(full(model[0].weight.detach()), before)
    assert messages(1, 1.0) == [] and opt.skipped == 5 and not opt.last.skipped
    assert not torch.equal(full(model[0].weight.detach()), before)


def check_steps_are_counted_once_for_all(world):
    """Of a parameter whose first gradient comes late, the first update beside torch's, as docs/python.md says."""
    class Experts(nn.Sequential):
        def forward(self, x, which):
            return self[which](x)

    moved = []
    for kind in (optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(5)
        model = Experts(nn.Linear(8, 8), nn.Linear(8, 8))
        for expert in model:
            fully_shard(expert)
        fully_shard(model)
        opt = kind(model.parameters(), lr=1e-2, weight_decay=0.0)
        before = full(model[1].weight.detach()).clone()
        for which in (0, 0, 0, 1):
            assert torch.equal(full(model[1].weight.detach()), before)
            model(X, which).sum().backward()
            opt.step()
            opt.zero_grad()
        moved.append(full(model[1].weight.detach()) - before)
    factor = (1 - 0.9) / (1 - 0.9**4) * ((1 - 0.999**4) / (1 - 0.999)) ** 0.5
    torch.testing.assert_close(moved[0], factor * moved[1], rtol=1e-3, atol=1e-7)


def check_operations_that_raise_on_one_rank(world):
    """All ranks are told at the same step, and go on."""
    class Sometimes(optim.Operation):
        def run(self, run, step):
            if world.rank == 0 and step.number == 1:  # which has a part of every parameter
                raise KeyError("on purpose")
            run.weight.sub_(step.lr * run.grad)

    model = made()
    opt = optim.Operations(model.parameters(), [Sometimes()], lr=0.1)
    backward(model)
    if world.rank == 0:
        expect_error(KeyError, ["on purpose"], opt.step)
    else:
        expect_error(RuntimeError, ["rank 0", "KeyError", "on purpose"], opt.step)
    assert all(p.grad is None for p in model.parameters())
    backward(model)
    opt.step()


def check_operations_that_answer_nonsense(world):
    class Unit(optim.Operation):
        def unit(self, name, shape):
            return 3

    class State(optim.Operation):
        def state(self, name, shape):
            return ["momentum"]

    for op, words in ((Unit(), ["Unit.unit", "0.weight", "3"]), (State(), ["State.state", "0.weight", "momentum"])):
        model = made()
        opt = optim.Operations(model.parameters(), [op])
        backward(model)
        expect_error(ValueError, words, opt.step)


def check_what_checkpoints_are_told(world):
    model, other = made(), made()
    opt = optim.AdamW(model.parameters())
    folder = os.path.join(world.folder, "told")

    def save(optim=opt, path=folder, **how):
        save_checkpoint(model, optim, path, **how)

    for how in ({"path": 3}, {"path": b"bytes"}, {"step": "x"}, {"step": -1}, {"keep": -1}, {"keep": 1.5}, {"extra": 3},
                {"optim": 3}):
        (name, value), = how.items()
        shown = "int" if name in ("extra", "optim") else repr(value)
        expect_error(ValueError, [f"save_checkpoint: {name}: wanted", shown], lambda: save(**how))
    expect_error(ValueError, ["load_checkpoint: path", "3"], lambda: load_checkpoint(model, opt, 3))
    for kind in (optim.SGD, torch.optim.SGD):  # its state would not be in the file
        foreign = kind(other.parameters(), lr=0.1)
        expect_error(ValueError, ["save_checkpoint: optim", "SGD"], lambda: save(foreign))
        expect_error(ValueError, ["load_checkpoint: optim", "SGD"], lambda: load_checkpoint(model, foreign, folder))
    assert not os.path.exists(folder)


def check_what_functions_are_told(world):
    for seconds in ("x", 0, NAN, None):
        expect_error(ValueError, ["deadline", repr(seconds)], lambda: dovetail.set_deadline(seconds))
    expect_error(ValueError, ["swap_linears", "int"], lambda: dovetail.nn.swap_linears(3))
    expect_error(ValueError, ["use_tensor_heap", "'on'"], lambda: dovetail.memory.use_tensor_heap("on"))
    model = made()
    expect_error(ValueError, ["no method", "3"], lambda: dovetail.register_fsdp_forward_method(model, 3))
    expect_error(ValueError, ["sharded_tensor: local", "int"],
                 lambda: dovetail.ragged.sharded_tensor(3, world.mesh, [(0, 1)], [1]))
    expect_error(ValueError, ["sharded_tensor: mesh", "int"],
                 lambda: dovetail.ragged.sharded_tensor(X, 3, [(0, 1)], [1]))
    weight = model[0].weight
    expect_error(ValueError, ["from_full: full", "int"], lambda: dovetail.ragged.from_full(3, weight))
    expect_error(ValueError, ["from_full: like", "DTensor"], lambda: dovetail.ragged.from_full(torch.ones(8, 8), X))

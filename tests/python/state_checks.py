"""State of optimizers: torch's state dicts, and checkpoints in the format of the C++ trainer."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_optimizer_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import dovetail
import models
from common import expect_error, full
from dovetail import Plan, fully_shard, optim
from dovetail.checkpoint import load_checkpoint, save_checkpoint

TOKENS = torch.arange(16).view(2, 8)
KINDS = {
    "adamw": (lambda p: optim.AdamW(p, lr=1e-2), {}),
    "adam8": (lambda p: optim.AdamW8bit(p, lr=1e-2), {"alignment": 256}),
    "sgd": (lambda p: optim.SGD(p, lr=1e-2, momentum=0.9), {}),
    "muon": (lambda p: optim.Muon(p, lr=1e-2), {}),
    "shampoo": (lambda p: optim.Shampoo(p, lr=1e-2, block=96, every=2), {}),
    "torch": (lambda p: torch.optim.AdamW(p, lr=1e-2), {}),
}


def decoder(seed=6, mesh=None, **plan):
    torch.manual_seed(seed)
    model = models.Decoder(width=64)
    for block in model.blocks:
        fully_shard(block, plan=Plan(**plan), mesh=mesh)
    return fully_shard(model, plan=Plan(**plan), mesh=mesh)


def step(model, opt, number, scheduler=None):
    model((TOKENS + 7 * number) % 64).square().mean().backward()
    opt.step()
    opt.zero_grad()
    if scheduler:
        scheduler.step()


def same(a, b):
    for (n, p), q in zip(a.named_parameters(), b.parameters()):
        torch.testing.assert_close(full(p.detach()), full(q.detach()), rtol=0, atol=0, msg=lambda m: f"{n}: {m}")


def whole_state(opt):
    return [{k: full(v) if isinstance(v, DTensor) else v for k, v in opt.state[p].items()}
            for g in opt.param_groups for p in g["params"]]


def degrees(world):
    """The first model's own last, after which it goes on."""
    if world.size > 1:
        yield {"zero2": 1}
        yield {"zero1": world.size // 2}
    yield {}


def check_state_dicts_of_torch(world):
    """DCP into an optimizer that has done nothing yet, at other degrees, and on from there in step."""
    for kind in ("adamw", "adam8", "shampoo"):  # state per element, block and unit
        make, plan = KINDS[kind]
        model = decoder(**plan)
        opt = make(model.parameters())
        for i in range(3):
            step(model, opt, i)
        folder = os.path.join(world.folder, kind)
        model_state, optim_state = get_state_dict(model, opt)
        dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
        for other in degrees(world):
            fresh = decoder(seed=1, **{**plan, **other})
            fresh_opt = make(fresh.parameters())
            model_state, optim_state = get_state_dict(fresh, fresh_opt)
            dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=folder)
            set_state_dict(fresh, fresh_opt, model_state_dict=model_state, optim_state_dict=optim_state)
            same(fresh, model)
            for a, b in zip(whole_state(fresh_opt), whole_state(opt)):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            if not other:
                for i in range(3, 5):
                    for m, o in ((model, opt), (fresh, fresh_opt)):
                        step(m, o, i)
                same(fresh, model)


def check_state_of_adamw_is_torchs(world):
    """A whole state dict of torch's AdamW goes into dovetail's and back."""
    torch.manual_seed(6)
    plain = models.Decoder(width=64)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    step(plain, theirs, 0)
    model = decoder()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters()):
            p.copy_(dovetail.ragged.from_full(q, p))
    opt = optim.AdamW(model.parameters(), lr=3e-2)
    opt.load_state_dict(theirs.state_dict())
    assert opt.param_groups[0]["lr"] == 1e-2
    for i in (1, 2):
        step(plain, theirs, i)
        step(model, opt, i)
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(full(p.detach()), q, rtol=1e-5, atol=1e-6)
    for a, b in zip(whole_state(opt), whole_state(theirs)):
        assert a["step"] == b["step"] == 3
        torch.testing.assert_close(a["exp_avg"], b["exp_avg"], rtol=1e-4, atol=1e-7)
    whole = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.rank == 0:
        torch.testing.assert_close(whole["state"]["head.weight"]["exp_avg"],
                                   theirs.state[plain.head.weight]["exp_avg"], rtol=1e-4, atol=1e-7)
    expect_error(ValueError, ["fields"], lambda: optim.SGD(decoder().parameters(), lr=1.0, momentum=0.9)
                 .load_state_dict(theirs.state_dict()))


def check_options_that_change(world):
    """Between steps, with state that goes on: rates of groups apart, weight decay, betas."""
    def run(make, shard):
        torch.manual_seed(6)
        model = models.Decoder(width=64) if not shard else decoder()
        vectors = [p for p in model.parameters() if p.dim() < 2]
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        opt = make([{"params": matrices}, {"params": vectors, "lr": 5e-3, "weight_decay": 0.0}])
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, [lambda s: 1 / (1 + s), lambda s: s / 2])
        for i in range(5):
            if i == 3:
                opt.param_groups[0]["weight_decay"] = 0.3
                for g in opt.param_groups:
                    g["betas"] = (0.8, 0.95)
            step(model, opt, i, scheduler)
        return [full(p.detach()) for p in model.parameters()]

    wanted = run(lambda p: torch.optim.AdamW(p, lr=1e-2), False)
    got = run(lambda p: optim.AdamW(p, lr=1e-2), True)
    for g, w in zip(got, wanted):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)

    # A rate that is a small part of the first one, to the digits that fp32 has.
    model = decoder()
    slow, *others = model.parameters()
    before = full(slow.detach()).clone()
    opt = optim.SGD([{"params": others, "lr": 1.0}, {"params": [slow], "lr": 1.2345678e-6}])
    (1e5 * model(TOKENS).square().sum()).backward()
    change = 1.2345678e-6 * full(slow.grad)
    opt.step()
    assert change.abs().max() > 0.1
    torch.testing.assert_close(before - full(slow.detach()), change, rtol=1e-5, atol=1e-6)  # roundings of weights
    # What groups cannot differ in is refused.
    opt = optim.AdamW([{"params": others}, {"params": [slow]}])
    opt.param_groups[1]["betas"] = (0.5, 0.9)
    expect_error(ValueError, ["group 1", "betas", "0.5"], lambda: step(model, opt, 0))


def check_checkpoints_of_the_trainers_format(world):
    for kind, (make, plan) in KINDS.items():
        folder = os.path.join(world.folder, "own", kind)
        model = decoder(**plan)
        opt = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        for i in range(2):
            step(model, opt, i, scheduler)
        path = save_checkpoint(model, opt, folder, step=2, extra={"epoch": 4})
        for other in degrees(world):
            fresh = decoder(seed=1, **{**plan, **other})
            fresh_opt = make(fresh.parameters())
            loaded = load_checkpoint(fresh, fresh_opt, folder)
            assert (loaded.path, loaded.step, loaded.extra) == (path, 2, {"epoch": 4}), loaded
            assert fresh_opt.param_groups[0]["lr"] == opt.param_groups[0]["lr"] == 1e-2 / 4
            same(fresh, model)
            for a, b in zip(whole_state(fresh_opt), whole_state(opt)):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            if not other:
                for m, o in ((model, opt), (fresh, fresh_opt)):
                    step(m, o, 3)
                same(fresh, model)
        weights = decoder(seed=2)
        load_checkpoint(weights, None, path)
    # At another number of ranks: each rank alone.
    alone = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("all", "alone"))["alone"]
    one = decoder(seed=3, mesh=alone)
    opt = optim.Muon(one.parameters(), lr=1e-2)
    load_checkpoint(one, opt, os.path.join(world.folder, "own", "muon"))
    both = decoder(seed=4)
    load_checkpoint(both, None, os.path.join(world.folder, "own", "muon"))
    same(one, both)


def check_checkpoints_that_do_not_fit_or_are_damaged(world):
    folder = os.path.join(world.folder, "damaged")
    model = fully_shard(models.Convolutions())
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    opt.step()
    first = save_checkpoint(model, opt, folder)
    mean = model.body[1].running_mean.clone()
    model(torch.randn(2, 3, 4, 4)).sum().backward()
    opt.step()
    second = save_checkpoint(model, opt, folder)
    expect_error(dovetail.ConfigError, ["exp_avg"], lambda: load_checkpoint(
        model, torch.optim.SGD(model.parameters(), lr=1, momentum=0.9), folder))
    expect_error(dovetail.ConfigError, ["blocks"], lambda: load_checkpoint(decoder(), None, folder))
    expect_error(ValueError, ["step", "-1"], lambda: save_checkpoint(model, opt, folder, step=-1))
    expect_error(ValueError, ["JSON"], lambda: save_checkpoint(model, opt, folder, step=9, extra={"x": model}))
    if world.rank == 0:
        data = next(f for f in sorted(os.listdir(second)) if not f.endswith(".json"))
        with open(os.path.join(second, data), "r+b") as file:
            file.seek(100)
            byte = file.read(1)
            file.seek(100)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    expect_error(dovetail.FileError, [os.path.basename(second)], lambda: load_checkpoint(model, opt, second))
    loaded = load_checkpoint(model, opt, folder)
    assert loaded.path == first and loaded.step == 1 and len(loaded.passed_over) == 1, loaded
    torch.testing.assert_close(model.body[1].running_mean, mean)
    assert model.body[1].num_batches_tracked == 1
    expect_error(dovetail.FileError, ["nothing-here"], lambda: load_checkpoint(model, opt, folder + "/nothing-here"))

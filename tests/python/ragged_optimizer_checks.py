"""Checks of optimizers, schedulers, clipping, weight averages and gradient scaling, on both kinds of parameters."""

import copy
import math

import torch
from dovetail.ragged import ShardedTensor, local_elements
from ragged_support import SHAPES, close, layout_kept, raises, replicate, same, sharded, values
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

STEPS = 2
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, dict(lr=.1, weight_decay=.1)),
    "AdamW amsgrad": (torch.optim.AdamW, dict(lr=.1, amsgrad=True)),
    "AdamW foreach": (torch.optim.AdamW, dict(lr=.1, foreach=True)),
    "AdamW fused": (torch.optim.AdamW, dict(lr=.1, fused=True)),
    "AdamW tensor lr": (torch.optim.AdamW, dict(lr=torch.tensor(.1))),
    "Adam": (torch.optim.Adam, dict(lr=.1, weight_decay=.1)),
    "Adam foreach maximize": (torch.optim.Adam, dict(lr=.1, foreach=True, maximize=True)),
    "SGD": (torch.optim.SGD, dict(lr=.1)),
    "SGD momentum": (torch.optim.SGD, dict(lr=.1, momentum=.9, weight_decay=.1, nesterov=True)),
    "SGD foreach": (torch.optim.SGD, dict(lr=.1, momentum=.9, foreach=True)),
    "SGD fused": (torch.optim.SGD, dict(lr=.1, momentum=.9, fused=True)),
    "Adagrad": (torch.optim.Adagrad, dict(lr=.1, initial_accumulator_value=.1)),
    "Adagrad foreach": (torch.optim.Adagrad, dict(lr=.1, foreach=True)),
    "Adagrad fused": (torch.optim.Adagrad, dict(lr=.1, fused=True)),
    "RMSprop": (torch.optim.RMSprop, dict(lr=.1, momentum=.5, centered=True)),
    "RMSprop foreach": (torch.optim.RMSprop, dict(lr=.1, momentum=.5, centered=True, foreach=True)),
    "NAdam": (torch.optim.NAdam, dict(lr=.1, weight_decay=.1)),
    "NAdam foreach": (torch.optim.NAdam, dict(lr=.1, foreach=True)),
    "RAdam": (torch.optim.RAdam, dict(lr=.1)), "RAdam foreach": (torch.optim.RAdam, dict(lr=.1, foreach=True)),
    "Adamax": (torch.optim.Adamax, dict(lr=.1)), "Adamax foreach": (torch.optim.Adamax, dict(lr=.1, foreach=True)),
    "Adadelta": (torch.optim.Adadelta, dict(lr=1.)),
    "Adadelta foreach": (torch.optim.Adadelta, dict(lr=1., foreach=True)),
    "ASGD": (torch.optim.ASGD, dict(lr=.1)), "ASGD foreach": (torch.optim.ASGD, dict(lr=.1, foreach=True)),
    "Rprop": (torch.optim.Rprop, dict(lr=.1)), "Rprop foreach": (torch.optim.Rprop, dict(lr=.1, foreach=True)),
}
# Stock DTensor has no rule for what these do, so a stock parameter among them fails in torch itself.
STOCK_LACKS = ("Rprop", "Rprop foreach", "Adagrad fused", "SGD fused")


def parameters(world, dtype=torch.float32, stock: bool = True) -> tuple[list, list]:
    """Sharded and stock parameters, and their whole counterparts."""
    names = [name for name in SHAPES if stock or name != "rows"]
    return ([torch.nn.Parameter(sharded(world, name, dtype=dtype)) for name in names],
            [torch.nn.Parameter(values(name, dtype)) for name in names])


def set_gradients(world, mine: list, reference: list, seed: int, factor: float = 1.) -> None:
    names = [name for name in SHAPES if len(mine) == len(SHAPES) or name != "rows"]
    for name, p, q in zip(names, mine, reference, strict=True):
        q.grad = values(name, q.dtype, seed) * factor
        p.grad = sharded(world, name, seed=seed, dtype=q.dtype)
        with torch.no_grad():
            p.grad.mul_(factor)


def train(world, mine, reference, optimizers, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        set_gradients(world, mine, reference, seed=step)
        for optimizer in optimizers:
            optimizer.step()


def compare_all(mine, reference, note: str) -> None:
    for p, q in zip(mine, reference, strict=True):
        same(p, q, f"{note} {tuple(q.shape)}")


def check_optimizers_bit_for_bit(world):
    for name, (kind, options) in OPTIMIZERS.items():
        if "fused" in name:
            continue
        mine, reference = parameters(world, stock=name not in STOCK_LACKS)
        a, b = kind(mine, **options), kind(reference, **options)
        train(world, mine, reference, (a, b), 1, STEPS)
        compare_all(mine, reference, name)
        for p, q in zip(mine, reference):
            assert set(a.state[p]) == set(b.state[q])
            for key, value in b.state[q].items():
                got = a.state[p][key]
                if isinstance(value, torch.Tensor) and isinstance(got, DTensor):
                    layout_kept(got, p)
                    same(got, value, f"{name} {key}")
                else:
                    assert got == value, (name, key, got, value)


def check_fused_and_bf16_optimizers(world):
    """torch's fused and bf16 kernels on CPU round an element by where it lies in the tensor: what holds bit for bit is
    the same optimizer on the plain shard, and the whole tensor to rounding."""
    runs = [(name, torch.float32) for name in OPTIMIZERS if "fused" in name]
    runs += [(name, torch.bfloat16) for name in ("AdamW", "AdamW foreach", "SGD momentum", "AdamW fused")]
    for name, dtype in runs:
        kind, options = OPTIMIZERS[name]
        mine, reference = parameters(world, dtype, stock=name not in STOCK_LACKS)
        shards = [torch.nn.Parameter(local_elements(p).clone()) for p in mine]
        optimizers = [kind(tensors, **options) for tensors in (mine, reference, shards)]
        for step in range(1, STEPS + 1):
            set_gradients(world, mine, reference, step)
            for p, part in zip(mine, shards):
                part.grad = local_elements(p.grad).clone()
            for optimizer in optimizers:
                optimizer.step()
        for p, q, part in zip(mine, reference, shards):
            assert torch.equal(local_elements(p), part), (name, dtype)
            close_enough = dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(p.full_tensor(), q, **close_enough)


def check_optimizer_state_dict(world):
    for name in ("AdamW", "AdamW foreach", "SGD momentum", "Adagrad", "RMSprop foreach"):
        kind, options = OPTIMIZERS[name]
        mine, reference = parameters(world)
        a, b = kind(mine, **options), kind(reference, **options)
        train(world, mine, reference, (a, b), 1, 2)
        saved = copy.deepcopy(a.state_dict())
        train(world, mine, reference, (a, b), 5, 1)  # what was saved does not follow
        weights = [q.detach().clone() for q in reference]
        a.load_state_dict(saved)
        b_saved = kind(reference, **options)
        again, whole_again = parameters(world)
        c, d = kind(again, **options), kind(whole_again, **options)
        train(world, again, whole_again, (c, d), 1, 2)
        b_saved.load_state_dict(d.state_dict())
        train(world, mine, reference, (a, b_saved), 6, 2)
        compare_all(mine, reference, name)
        assert any(not torch.equal(w, q) for w, q in zip(weights, reference))


def check_optimizers_that_need_the_whole(world):
    """Adafactor and Muon gather; the result is that of one process, to rounding."""
    for options in (dict(lr=.1, foreach=False, weight_decay=.1), dict(lr=.1, foreach=True)):
        mine, reference = parameters(world, stock=False)
        nothing = [i for i, q in enumerate(reference) if not q.numel()]  # divides by its number of elements
        set_gradients(world, mine, reference, 1)
        keep = [i for i in range(len(mine)) if i not in nothing]
        a, b = (torch.optim.Adafactor([list_[i] for i in keep], **options) for list_ in (mine, reference))
        for step in range(1, 4):
            set_gradients(world, mine, reference, step)
            a.step()
            b.step()
        for i in keep:
            close(mine[i], reference[i], "Adafactor")
    wide = torch.nn.Parameter(sharded(world, "matrix"))
    tall = torch.nn.Parameter(sharded(world, "matrix").view(7, 5).detach())
    assert type(wide) is type(tall) is ShardedTensor
    p, q = [wide, tall], [torch.nn.Parameter(values("matrix")), torch.nn.Parameter(values("matrix").view(7, 5))]
    a, b = torch.optim.Muon(p, lr=.1), torch.optim.Muon(q, lr=.1)
    for step in (1, 2):
        for x, y in zip(p, q):
            y.grad = values("matrix", seed=step).view(y.shape)
            x.grad = sharded(world, "matrix", seed=step).view(x.shape)
        a.step()
        b.step()
    for x, y in zip(p, q):
        torch.testing.assert_close(x.full_tensor(), y, rtol=2e-2, atol=2e-3)  # bf16 inside


def check_schedulers(world):
    schedulers = (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
                  lambda o: torch.optim.lr_scheduler.OneCycleLR(o, .1, total_steps=8),
                  lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)))
    for schedule in schedulers:
        mine, reference = parameters(world)
        a, b = torch.optim.AdamW(mine, lr=.1), torch.optim.AdamW(reference, lr=.1)
        sa, sb = schedule(a), schedule(b)
        for step in range(1, 4):
            train(world, mine, reference, (a, b), step, 1)
            sa.step()
            sb.step()
        compare_all(mine, reference, "scheduler")


def check_clip_grad_norm(world):
    for p in (2.0, 1.0, 3.0, math.inf):
        for foreach in (True, False):
            for stock in (True, False):
                mine, reference = parameters(world, stock=stock)
                set_gradients(world, mine, reference, 1, factor=10)
                # The infinity norm of a tensor without elements is 0 here; torch refuses it.
                counted = [q for q in reference if q.numel()]
                total = get_total_norm([x.grad for x in mine], p, foreach=foreach)
                norm = clip_grad_norm_(mine, 1.5, p, foreach=foreach, error_if_nonfinite=True)
                expected = clip_grad_norm_(counted, 1.5, p)
                for got in (total, norm):
                    close(got, expected, f"norm {p}")
                assert len(set(world.everyone(float(norm.full_tensor() if stock else norm)))) == 1
                for x, y in zip(mine, reference):
                    close(x.grad, y.grad, f"clipped {p} {foreach}")
    mine, reference = parameters(world)
    set_gradients(world, mine, reference, 1, factor=10)
    clip_grad_value_(mine, .5)
    clip_grad_value_(reference, .5)
    for x, y in zip(mine, reference):
        same(x.grad, y.grad)


def check_clip_refuses_nonfinite_on_every_rank(world):
    for bad in (math.nan, math.inf):
        for foreach in (True, False):
            mine, reference = parameters(world, stock=False)
            set_gradients(world, mine, reference, 1)
            with torch.no_grad():
                mine[0].grad[4, 6] = bad  # one element, of one rank
            raises(RuntimeError, lambda: clip_grad_norm_(mine, 1., error_if_nonfinite=True, foreach=foreach), "finite")
            norm = clip_grad_norm_(mine, 1., foreach=foreach)
            assert not math.isfinite(norm.item())


def check_averages(world):
    mine, reference = parameters(world)
    live, whole_live = torch.nn.ParameterList(mine), torch.nn.ParameterList(reference)
    for averaging in (dict(multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(.9)), {},
                      dict(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(.9))):
        ema = torch.optim.swa_utils.AveragedModel(live, **averaging)
        whole = torch.optim.swa_utils.AveragedModel(whole_live, **averaging)
        for step in range(3):
            with torch.no_grad():
                for p, q in zip(mine, reference):
                    p.add_(step)
                    q.add_(step)
            ema.update_parameters(live)
            whole.update_parameters(whole_live)
        for p, q, x in zip(ema.module, whole.module, mine):
            layout_kept(p, x)
            same(p, q, str(averaging))
    # The scripts that people write by hand.
    for update in (lambda e, p: e.lerp_(p, .1), lambda e, p: e.mul_(.9).add_(p, alpha=.1),
                   lambda e, p: e.mul_(.9).add_(p * .1), lambda e, p: e.copy_(.9 * e + .1 * p),
                   lambda e, p: e.sub_(.1 * (e - p)), lambda e, p: e.data.mul_(.9).add_(p.data, alpha=.1)):
        for p, q in zip(mine, reference):
            e, f = p.detach().clone(), q.detach().clone() * 1
            with torch.no_grad():
                p.mul_(1.5)
                q.mul_(1.5)
                update(e, p)
                update(f, q)
            same(e, f)


def check_gradient_scaler(world):
    for bad in (False, True):
        mine, reference = parameters(world)
        a, b = torch.optim.SGD(mine, lr=.1), torch.optim.SGD(reference, lr=.1)
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.) for _ in range(2)]
        for scaler, optimizer in zip(scalers, (a, b)):
            scaler.scale(torch.zeros(1))
            set_gradients(world, mine, reference, 1, factor=4)
            if bad:
                with torch.no_grad():
                    mine[0].grad[4, 6] = math.inf
                    reference[0].grad[4, 6] = math.inf
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        compare_all(mine, reference, f"scaler {bad}")
        assert scalers[0].get_scale() == scalers[1].get_scale() == (2 if bad else 4)


def check_gradients_accumulate(world):
    mine, reference = parameters(world)
    for _ in range(2):
        for name, p, q in zip(SHAPES, mine, reference):
            x = values(name, seed=4)
            (p.full_tensor() * x).sum().backward()
            (q * x).sum().backward()
    for p, q in zip(mine, reference):
        layout_kept(p.grad, p)
        same(p.grad, q.grad)
    torch.optim.AdamW(mine).zero_grad()
    assert all(p.grad is None for p in mine)
    set_gradients(world, mine, reference, 1)
    torch.optim.AdamW(mine).zero_grad(set_to_none=False)
    for p in mine:
        same(p.grad, torch.zeros(p.shape))
    same(replicate(world, torch.ones(3)), torch.ones(3))

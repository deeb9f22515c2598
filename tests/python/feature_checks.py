"""What users do around training, and the optimizers that run on the engine."""

import copy
import gc
import pickle
import weakref

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_model_state_dict, set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dovetail
import models
from common import expect_error, full
from dovetail import fully_shard, optim


TOKENS = torch.arange(16).view(2, 8)


def decoder(shard=True):
    torch.manual_seed(6)
    model = models.Decoder()
    if shard:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def own_tokens():
    """Other data on every rank, so that a gradient that was not reduced shows."""
    return (TOKENS + 5 * dist.get_rank()) % 64


def gradients(model):
    model.zero_grad()
    model(own_tokens()).square().mean().backward()
    return [full(p.grad).clone() for p in model.parameters()]


def check_what_cannot_be_is_refused(world):
    model = decoder()
    assert type(model).__name__ == "FSDPDecoder" and isinstance(model, (dovetail.FSDPModule, models.Decoder))
    expect_error(RuntimeError, ["copied"], lambda: copy.deepcopy(model))
    expect_error(RuntimeError, ["pickled"], lambda: pickle.dumps(model))
    expect_error(ValueError, ["already"], lambda: fully_shard(model))
    expect_error(ValueError, ["containers"], lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])))
    expect_error(ValueError, ["block", "rows"], lambda: fully_shard(nn.Linear(2, 2), plan=dovetail.Plan(block="rows")))
    expect_error(ValueError, ["nonsense"], lambda: fully_shard(nn.Linear(2, 2), comm="nonsense"))
    for factor in (0.0, -1.0, float("nan")):
        expect_error(ValueError, ["factor", str(factor)], lambda: model.set_gradient_divide_factor(factor))
    top_down = fully_shard(models.Mlp())
    expect_error(ValueError, ["bottom-up"], lambda: fully_shard(top_down.layers[0]))
    expect_error(ValueError, ["float16"], lambda: fully_shard(
        nn.Linear(2, 2), mp_policy=dovetail.MixedPrecisionPolicy(param_dtype=torch.float16)))


def check_evaluation_and_writes(world):
    model, reference, tokens = decoder(), decoder(shard=False), TOKENS
    # Without gradients, before and after training, and a forward that throws.
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens))
    expect_error(IndexError, [], lambda: model(tokens + 1000))
    model(tokens).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens))

    # Writes to parameters count at the next forward.
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
        for p in reference.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(model(tokens), reference(tokens))

    # Between a forward and a backward pass parameters are the sharded ones: an optimizer made then holds them.
    loss = model(tokens).sum()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    loss.backward()

    # Memory exchanged under parameters is taken over; other objects in their place are refused.
    expect_error(NotImplementedError, ["float64"], model.double)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens))
    model._apply(lambda t: t.clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.zero_grad()
    model(tokens).square().mean().backward()
    optimizer.step()
    reference(tokens).square().mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens))
    kept = model.head.weight
    model.head.weight = nn.Parameter(kept.detach().clone())
    expect_error(RuntimeError, ["head.weight", "replaced"], lambda: model(tokens))
    model.head.weight = kept

    # Whole parameters between unshard and reshard.
    block = model.blocks[1]
    block.unshard()
    assert not isinstance(block.up.weight, DTensor)
    torch.testing.assert_close(block.up.weight.detach(), reference.blocks[1].up.weight.detach())
    block.reshard()
    assert isinstance(block.up.weight, DTensor) and block.up.weight.shape == (64, 32)


def check_a_model_that_is_let_go_is_freed(world):
    model = decoder()
    gradients(model)
    gone = weakref.ref(model), weakref.ref(model._unit().runtime)
    del model
    gc.collect()
    assert [r() for r in gone] == [None, None], [gc.get_referrers(r()) for r in gone if r() is not None]


def check_activation_checkpointing(world):
    model = decoder()
    plain = gradients(model)
    for reentrant in (False, True):
        forwards = [(b, b.forward) for b in model.blocks]
        for b, forward in forwards:
            b.forward = lambda s, causal, f=forward: {
                "x": checkpoint(lambda x, f=f: f({"x": x, "depth": 0}, causal=causal)["x"], s["x"],
                                use_reentrant=reentrant), "depth": s["depth"] + 1}
        for a, b in zip(gradients(model), plain):
            torch.testing.assert_close(a, b)
        for b, forward in forwards:
            del b.forward


def check_micro_batches(world):
    model, tokens = decoder(), own_tokens()
    plain = gradients(model)
    # Without communication, then one that reduces.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model(tokens).square().mean().backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model(tokens).square().mean().backward()
    for p, g in zip(model.parameters(), plain):
        torch.testing.assert_close(full(p.grad), 2 * g)
    # Gradients that add up with communication in each.
    model(tokens).square().mean().backward()
    for p, g in zip(model.parameters(), plain):
        torch.testing.assert_close(full(p.grad), 3 * g, rtol=1e-5, atol=1e-6)


def check_a_module_called_outside_of_its_unit(world):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))

    def run(*units):
        torch.manual_seed(5)
        model = models.Conditioned()
        for unit in units:
            fully_shard(model.get_submodule(unit))
        model(x).square().mean().backward()
        return [full(p.grad) for p in model.parameters()]

    for got, wanted in zip(run("blocks.0.embed", "blocks.0", "blocks.1", ""), run()):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    if world.size > 1:
        expect_error(RuntimeError, ["(4, 3)", "whole only while its unit runs"],
                     lambda: run("blocks.0", "blocks.1", ""))


def check_divide_factor_and_ignored_parameters(world):
    model, tokens = decoder(), own_tokens()
    plain = gradients(model)
    model.zero_grad()
    for m in (*model.blocks, model):
        m.set_gradient_divide_factor(1.0)
    model(tokens).square().mean().backward()
    for p, g in zip(model.parameters(), plain):
        torch.testing.assert_close(full(p.grad), world.size * g, rtol=1e-5, atol=1e-6)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(other, ignored_params={other[1].weight})
    other(torch.ones(1, 4)).sum().backward()
    assert not isinstance(other[1].weight, DTensor) and other[1].weight.grad is not None


def check_meta_device(world):
    torch.manual_seed(12)
    with torch.device("meta"):
        late = models.Mlp()
    for layer in late.layers:
        fully_shard(layer)
    fully_shard(late)
    expect_error(RuntimeError, ["meta"], lambda: late(torch.ones(2, 32)))
    late.to_empty(device="cpu")
    early = models.Mlp()
    set_model_state_dict(late, early.state_dict(), options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(late(torch.ones(2, 32)), early(torch.ones(2, 32)))


def check_checkpoints_of_torch(world):
    """Written by one fully_shard, read by the other, and as whole state dicts."""
    def state(model, opt):
        return dict(zip(("model", "optimizer"), get_state_dict(model, opt)))

    def trained(shard, steps):
        torch.manual_seed(9)
        model = models.Decoder()
        for block in model.blocks:
            shard(block)
        shard(model)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(steps):
            model(TOKENS).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return model, opt

    def same(a, b):
        for (name, p), q in zip(a.named_parameters(), b.parameters()):
            torch.testing.assert_close(full(p.detach()), full(q.detach()), rtol=1e-5, atol=1e-6, msg=name)

    both = ((fully_shard, torch_fully_shard), (torch_fully_shard, fully_shard), (fully_shard, fully_shard))
    for writer, reader in both:
        folder = f"{world.folder}/{writer.__module__}-{reader.__module__}"
        model, opt = trained(writer, 3)
        dcp.save(state(model, opt), checkpoint_id=folder)
        other, other_opt = trained(reader, 1)
        loaded = state(other, other_opt)
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(other, other_opt, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        same(model, other)
        for m, o in ((model, opt), (other, other_opt)):
            m(TOKENS).square().mean().backward()
            o.step()
        same(model, other)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    single = decoder(shard=False)
    single.load_state_dict(whole)
    with torch.no_grad():
        torch.testing.assert_close(single(TOKENS), model(TOKENS))
    fresh = decoder()
    set_model_state_dict(fresh, single.state_dict(), options=StateDictOptions(full_state_dict=True))
    same(model, fresh)


def check_optimizers_of_the_engine(world):
    """Against the same on one process."""
    def run(make, shard, degrees=None):
        torch.manual_seed(8)
        model = models.Mlp()
        if shard:
            how = {"plan": dovetail.Plan(**(degrees or {}))}
            for layer in model.layers:
                fully_shard(layer, **how)
            fully_shard(model, **how)
        opt = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 1 / (1 + s))
        for step in range(4):
            parts = [torch.randn(4, 32, generator=torch.Generator().manual_seed(100 * step + r))
                     for r in range(world.size)]
            model(parts[world.rank] if shard else torch.cat(parts))[:, :16].square().mean().backward()
            opt.step()
            scheduler.step()
            opt.zero_grad()
        return {n: full(p.detach()) for n, p in model.named_parameters()}

    torch.manual_seed(8)
    initial = dict(models.Mlp().named_parameters())
    reference = run(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), False)
    for degrees in ({}, {"zero3": 1}, {"zero3": world.size // 2}):
        got = run(lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1), True, degrees)
        for n in reference:
            torch.testing.assert_close(got[n], reference[n], rtol=1e-4, atol=1e-4)
    reference = run(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), False)
    got = run(lambda p: optim.SGD(p, lr=1e-2, momentum=0.9), True)
    for n in reference:
        torch.testing.assert_close(got[n], reference[n], rtol=1e-5, atol=1e-6)
    # Units are assembled where shards cut them: the same as where each matrix is whole.
    for make in (optim.Muon, optim.Shampoo):
        cut = run(lambda p: make(p, lr=1e-2), True)
        assert all((cut[n] - initial[n]).abs().max() > 1e-3 for n in cut if n.endswith("weight"))
        whole = run(lambda p: make(p, lr=1e-2), True, {"block": "matrix"})
        for n in cut:
            torch.testing.assert_close(cut[n], whole[n], rtol=0, atol=0)


def check_schedules_from_and_to_zero(world):
    """A learning rate of 0 in all groups hides their ratios; what they are in other steps stays right."""
    def run(make, shard, length=4):
        model = decoder(shard)
        *others, last = model.parameters()
        opt = make([{"params": others, "lr": 1e-2}, {"params": [last], "lr": 5e-3, "weight_decay": 0.0}])
        scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: (0, 1, 0.5, 0)[step])
        for step in range(length):
            model(TOKENS + step).square().mean().backward()
            opt.step()
            if step + 1 < length:
                scheduler.step()
            opt.zero_grad()
        return [full(p.detach()) for p in model.parameters()]

    for got, wanted in zip(run(lambda g: optim.AdamW(g, weight_decay=0.1), True),
                           run(lambda g: torch.optim.AdamW(g, weight_decay=0.1), False)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)

    # The first group rests, the others learn.
    model = decoder()
    first, *others = model.parameters()
    before = full(first.detach()).clone()
    opt = optim.SGD([{"params": [first], "lr": 0.0}, {"params": others}], lr=1e-2)
    model(TOKENS).square().mean().backward()
    opt.step()
    torch.testing.assert_close(full(first.detach()), before, rtol=0, atol=0)
    assert all(p.grad is None for p in others)


class Experts(nn.Module):
    """Matrices in one tensor, [experts, out, in], or each in a parameter of its own."""

    def __init__(self, matrices, fused):
        super().__init__()
        if fused:
            self.weight = nn.Parameter(matrices.clone())
        else:
            self.weight = nn.ParameterList(m.clone() for m in matrices)

    def forward(self, x):
        return sum((x @ m.t()).square().mean() for m in self.weight)


def check_fused_experts_are_matrices_to_muon(world):
    """The same as if each expert's matrix were a parameter; a kernel of a convolution is one matrix."""
    matrices = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(3))
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(world.rank))

    def run(module, x, block):
        fully_shard(module, plan=dovetail.Plan(block=block))
        opt = optim.Muon(module.parameters(), lr=0.1)
        for _ in range(2):
            module(x).square().mean().backward()
            opt.step()
        return [full(p.detach()) for p in module.parameters()]

    alone = run(Experts(matrices, fused=False), x, "matrix")
    for block in ("element", "expert", "matrix"):
        fused, = run(Experts(matrices, fused=True), x, block)
        torch.testing.assert_close(fused, torch.stack(alone), rtol=1e-5, atol=1e-6)

    def kernel(as_linear):
        torch.manual_seed(4)
        convolution = nn.Conv1d(8, 6, 3)
        if not as_linear:
            return run(convolution, x[None, :, :].mT[:, :, :3], "element")[0].flatten(1)
        linear = nn.Linear(24, 6)
        linear.load_state_dict({"weight": convolution.weight.flatten(1), "bias": convolution.bias})
        return run(linear, x[:3].t().reshape(1, 24), "element")[0]

    torch.testing.assert_close(kernel(as_linear=False), kernel(as_linear=True), rtol=1e-5, atol=1e-6)


def check_blocks_of_8_bit_state(world):
    """Equal bits however many ranks there are; where a shard would cut a block every rank says so, and goes on."""
    def run(plan, mesh=None):
        torch.manual_seed(13)
        model = fully_shard(nn.Linear(70, 200, bias=False), plan=plan, mesh=mesh)
        opt = optim.AdamW8bit(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.ones(2, 70)).square().mean().backward()
            opt.step()
        return full(model.weight.detach())

    expect_error(ValueError, ["weight", "256"], lambda: run(dovetail.Plan()))
    alone = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("all", "alone"))["alone"]
    torch.testing.assert_close(run(dovetail.Plan(alignment=256)), run(dovetail.Plan(), alone), rtol=0, atol=0)

"""Tensor-parallel modules trained by dovetail.fully_shard and by torch's: the same losses, norms and weights."""

import dataclasses
import functools
import itertools

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import dovetail
from common import full, what_torch_does
from comparison import BOUNDS, adamw, differences, sgd, train
from dovetail import MixedPrecisionPolicy, fully_shard
from tensor_parallel_support import alone, batch, llama, mesh_of, meshes, mlp, sharded, uneven


def engine_adamw(params):
    return dovetail.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def compare(case, mesh, optimizer, *ways, ours=None, clip=None, bf16=False):
    """Trains with torch's, and with dovetail's in each of several ways. Returns the last run."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if bf16 else {}
    rank, dp = mesh["dp"].get_local_rank(), mesh["dp"]
    theirs = train(case, rank, torch_fully_shard, optimizer, clip, mesh=dp, mp_policy=TorchPolicy(**dtypes))
    # Two data-parallel ranks have sums of the same bits. Norms and the engine's fused update differ by a rounding:
    # losses 3.4e-7, norms 4.3e-7, weights 8.9e-7 at most; all else was equal bit for bit, in bf16 too.
    bounds = BOUNDS[optimizer.__name__, bf16] if bf16 else dict.fromkeys(("losses", "norms", "weights"), 1e-6)
    for how in ways:
        run = train(case, rank, fully_shard, ours or optimizer, clip, mesh=dp, mp_policy=MixedPrecisionPolicy(**dtypes),
                    **how)
        found = differences(case, run, theirs)
        assert all(found[what] <= bounds[what] for what in bounds), (how, found, bounds, run.losses, theirs.losses)
        assert all(loss != run.losses[0] for loss in run.losses[1:]), run.losses
    return run


PLAIN, MESSAGES = {"comm": "peer"}, {"comm": "c10d"}


def check_mlp(world):
    for mesh in meshes(world):
        compare(mlp(mesh), mesh, sgd, PLAIN, {"reshard_after_forward": True},
                MESSAGES | {"reshard_after_forward": False})
        compare(mlp(mesh), mesh, adamw, MESSAGES, ours=engine_adamw)


def check_llama(world):
    mesh = meshes(world)[0]
    compare(llama(mesh), mesh, sgd, MESSAGES)
    compare(llama(mesh), mesh, adamw, PLAIN, {"reshard_after_forward": False}, clip=0.5)
    compare(llama(mesh), mesh, adamw, PLAIN, bf16=True)


def check_parts_of_several_sizes(world):
    for mesh in meshes(world):
        compare(uneven(mesh), mesh, sgd, PLAIN, MESSAGES)
    mesh = meshes(world)[0]
    case = uneven(mesh, empty=True)
    for step in range(2):
        same_gradients(gradients(case, mesh, sharded(case, mesh, fully_shard), step), alone(mesh, step))


def check_plans(world):
    """Degrees below zero1, and blocks."""
    mesh = meshes(world)[0]
    compare(mlp(mesh), mesh, sgd, *({"plan": p} for p in (dovetail.Plan(zero3=1), dovetail.Plan(zero2=1),
                                                          dovetail.Plan(block="matrix"))))


def check_replicas_of_shards(world):
    """A 2-D mesh of replicas and shards beside the tensor-parallel dimension."""
    if world.size != 4:
        return
    for shape in ((2, 1, 2), (1, 2, 2)):
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "dp", "tp"))
        case, both = mlp(mesh), mesh["copies", "dp"]
        rank = mesh["copies"].get_local_rank() * shape[1] + mesh["dp"].get_local_rank()
        theirs = train(case, rank, torch_fully_shard, sgd, mesh=both)
        for optimizer in (sgd, lambda p: dovetail.optim.SGD(p, lr=0.05, momentum=0.9)):
            ours = train(case, rank, fully_shard, optimizer, mesh=both)
            found = differences(case, ours, theirs)
            assert all(d <= 1e-6 for d in found.values()), found
        p = ours.model.layers[0][0].weight
        assert p.device_mesh == torch.distributed.device_mesh.DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])


# What modules have.

def check_what_modules_have(world):
    for mesh in meshes(world):
        case = uneven(mesh, empty=mesh["tp"].size() > 1)
        model, whole = sharded(case, mesh, fully_shard), dict(case.make().named_parameters())
        seen = {}

        def look(name, module):
            weight = module.weight
            seen[name] = (weight.placements, weight.device_mesh, weight.shape, weight.stride(), weight.requires_grad,
                          weight.to_local().detach().clone())

        for name, m in model.named_modules():
            if isinstance(m, nn.Linear):
                m.register_forward_pre_hook(lambda m, args, name=name: look(name, m))
        x, y = batch(case, mesh)
        initial = {n: full(p.detach()) for n, p in model.named_parameters()}
        for _ in range(2):
            case.loss(model, x, y).backward()
            for name, (placements, of, shape, stride, requires_grad, local) in seen.items():
                before = whole[name + ".weight"]
                assert (placements, shape, stride) == (before.placements, before.shape, before.stride()), name
                assert of == mesh["tp"] and requires_grad
                wanted = DTensor.from_local(local, of, placements, shape=shape, stride=stride).full_tensor()
                assert torch.equal(wanted, initial[name + ".weight"]), name
            assert len(seen) == 4
            seen.clear()
            with torch.no_grad():  # a forward without gradients leaves nothing behind
                model(x)
        assert all(p.grad is not None for p in model.parameters())
        # Between unshard and reshard as well.
        layer = model.layers[0]
        layer.unshard()
        assert layer[0].weight.placements == (Shard(0),) and layer[0].weight.requires_grad
        layer.reshard()
        assert layer[0].weight is dict(model.named_parameters())["layers.0.0.weight"]


def gradients(case, mesh, model, step=0):
    model.zero_grad()
    x, *others = batch(case, mesh, step)
    # Reentrant checkpoints want an input that needs gradients.
    case.loss(model, x.requires_grad_(x.is_floating_point()), *others).backward()
    return {n: full(p.grad).clone() for n, p in model.named_parameters()}


def same_gradients(one, other, factor=1.0):
    for name, g in one.items():
        torch.testing.assert_close(g, factor * other[name], rtol=1e-5, atol=1e-7, msg=lambda s: f"{name}: {s}")


def check_activation_checkpointing(world):
    """Of what is computed inside of units, and of whole units, whose hooks then run once more in backward."""
    mesh = meshes(world)[0]
    for case in (llama(mesh), uneven(mesh, empty=True)):
        for how in ({}, {"reshard_after_forward": False}):
            model = sharded(case, mesh, fully_shard, **how)
            plain, blocks = gradients(case, mesh, model), case.blocks(model)
            for reentrant, inside in itertools.product((False, True), repeat=2):
                for cls in {type(b) for b in blocks}:  # FSDP<Block>, which has neither of its own
                    name = "forward" if inside else "__call__"
                    setattr(cls, name, lambda self, *args, of=getattr(cls, name): checkpoint(
                        functools.partial(of, self), *args, use_reentrant=reentrant))
                with torch.no_grad():
                    model(batch(case, mesh)[0][:, :8])
                same_gradients(gradients(case, mesh, model), plain)
                for cls in {type(b) for b in blocks}:
                    delattr(cls, name)


def check_passes_of_every_kind(world):
    mesh = meshes(world)[0]
    case = uneven(mesh, empty=True)
    plain = alone(mesh)
    swapped = dataclasses.replace(case, make=lambda: dovetail.nn.swap_linears(case.make()))
    same_gradients(gradients(case, mesh, sharded(swapped, mesh, fully_shard)), plain)
    model = sharded(case, mesh, fully_shard)
    for prefetch in (True, False):
        if prefetch:
            model.zero_grad()
            model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
            model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
        same_gradients(gradients(case, mesh, model), plain)
    # Micro-batches without communication over data-parallel ranks.
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    case.loss(model, *batch(case, mesh)).backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    case.loss(model, *batch(case, mesh)).backward()
    same_gradients({n: full(p.grad) for n, p in model.named_parameters()}, plain, 2.0)
    # Units that stay gathered, through evaluation too.
    model.zero_grad()
    model.set_reshard_after_backward(False)
    with torch.no_grad():
        model(batch(case, mesh)[0])
    for _ in range(2):
        same_gradients(gradients(case, mesh, model), plain)
    model.set_reshard_after_backward(True)
    # One forward pass twice before backward; a graph kept; another process' memory under parameters.
    model.zero_grad()
    x, y = batch(case, mesh)
    (case.loss(model, x, y) + case.loss(model, x, y)).backward()
    same_gradients({n: full(p.grad) for n, p in model.named_parameters()}, plain, 2.0)
    model._apply(lambda t: t.clone())
    same_gradients(gradients(case, mesh, model), plain)
    # Frozen parameters have no gradient, and come back.
    frozen = model.layers[0][0].weight
    frozen.requires_grad_(False)
    model.zero_grad()
    case.loss(model, x, y).backward()
    assert frozen.grad is None and model.layers[0][2].weight.grad is not None
    frozen.requires_grad_(True)
    same_gradients(gradients(case, mesh, model), plain)


def check_units_that_hand_each_other_dtensors(world):
    mesh = meshes(world)[0]
    case = uneven(mesh)
    units = dataclasses.replace(case, blocks=lambda model: [m for m in model.modules() if isinstance(m, nn.Linear)])
    seen, models = [], [sharded(units, mesh, shard) for shard in (fully_shard, torch_fully_shard)]
    models[0].layers[0][2].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    ours, theirs = (gradients(case, mesh, model) for model in models)
    same_gradients(ours, theirs)
    assert isinstance(seen[0], DTensor) and seen[0].requires_grad


def check_norms_of_several_meshes(world):
    """Torch cannot clip parameters of one and of two mesh dimensions together; neither can this, and both say so."""
    mesh = meshes(world)[0]
    for shard in (torch_fully_shard, fully_shard):
        case = mlp(mesh)
        model = sharded(case, mesh, shard)
        case.loss(model, *batch(case, mesh)).backward()
        assert "mesh" in what_torch_does(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        split = [p for p in model.parameters() if p.device_mesh.ndim == 2]
        plain = [p for p in model.parameters() if p.device_mesh.ndim == 1]
        norms = [full(torch.nn.utils.get_total_norm([p.grad for p in group])) for group in (split, plain)]
        whole = [torch.nn.utils.get_total_norm([full(p.grad) for p in group]) for group in (split, plain)]
        torch.testing.assert_close(norms, whole)


def check_shared_weights(world):
    """Weights of two units, which are given back to the unit above both, while the rest of each stays."""
    mesh = meshes(world)[0]
    case = llama(mesh)

    def tied():
        torch.manual_seed(7)
        model = case.make()
        model.head.weight = model.embedding.weight
        model.blocks[1].wq.weight = model.blocks[0].wq.weight
        return model

    ours, theirs = tied(), tied()
    for unit in (ours.embedding, ours.head, *ours.blocks, ours):
        fully_shard(unit, mesh=mesh["dp"])
    for rank in range(mesh["dp"].size()):
        (case.loss(theirs, *case.batch(torch.Generator().manual_seed(rank))) / mesh["dp"].size()).backward()
    assert ours.head.weight is ours.embedding.weight and ours.head.weight.placements[1] == Shard(0)
    assert ours.blocks[0].wq.weight is ours.blocks[1].wq.weight
    same_gradients(gradients(case, mesh, ours), {n: full(p.grad) for n, p in theirs.named_parameters()})


def check_replicated_parameters_are_equal_on_all_ranks(world):
    mesh = meshes(world)[0]
    for optimizer, clip in ((engine_adamw, None), (adamw, 0.5)):
        run = train(llama(mesh), mesh["dp"].get_local_rank(), fully_shard, optimizer, clip, mesh=mesh["dp"])
        weight = run.model.norm.weight
        assert weight.placements[1] == Replicate()
        assert len(set(world.everyone(full(weight.detach()).numpy().tobytes()))) == 1
        assert len(set(world.everyone(tuple(run.norms)))) == 1

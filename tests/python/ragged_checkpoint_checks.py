"""Checks of checkpoints and state dicts: at another rank count, from and into FSDP2's layout, and into one process."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dovetail.ragged import ShardedTensor, from_full, intervals_of, local_elements, sharded_tensor
from ragged_support import SHAPES, cut, layout_kept, raises, same, sharded, values
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     get_state_dict, set_model_state_dict, set_optimizer_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Model(torch.nn.Module):
    """The set of parameters, and a plain buffer."""

    def __init__(self, tensors: dict):
        super().__init__()
        self.inner = torch.nn.Module()
        for name, t in tensors.items():
            self.inner.register_parameter(name, torch.nn.Parameter(t))
        self.register_buffer("count", torch.tensor([3.]))


def model(world, seed: int = 0, layout: int = 0) -> Model:
    return Model({name: sharded(world, name, seed, layout=layout) for name in SHAPES})


def whole_model(seed: int = 0) -> Model:
    return Model({name: values(name, seed=seed) for name in SHAPES})


def trained(m: Model, like=None, steps: int = 2, optimizer=None):
    """An AdamW after `steps` steps; `like` gives gradients their layout."""
    optimizer = optimizer or torch.optim.AdamW(m.parameters(), lr=.1)
    for step in range(steps):
        for name, p in m.inner.named_parameters():
            gradient = values(name, seed=step + 5)
            p.grad = from_full(gradient, p) if like else gradient
        optimizer.step()
    return optimizer


def same_model(m: Model, expected: Model) -> None:
    for (name, p), q in zip(m.named_parameters(), expected.parameters(), strict=True):
        same(p, q, name)
    assert torch.equal(m.count, expected.count)


def same_state(m: Model, optimizer, expected: Model, whole_optimizer) -> None:
    same_model(m, expected)
    for p, q in zip(m.parameters(), expected.parameters(), strict=True):
        a, b = optimizer.state[p], whole_optimizer.state[q]
        assert set(a) == set(b) == {"step", "exp_avg", "exp_avg_sq"}
        for key in a:
            same(a[key], b[key], key)
        for key in ("exp_avg", "exp_avg_sq"):
            layout_kept(a[key], p)


def goes_on(m: Model, optimizer, expected: Model, whole_optimizer) -> None:
    trained(m, like=m, steps=1, optimizer=optimizer)
    trained(expected, steps=1, optimizer=whole_optimizer)
    same_model(m, expected)


def folder(world, name: str) -> str:
    return os.path.join(world.folder, name)


class Part:
    """The first `size` ranks as a world of their own: another rank count in the same processes."""

    def __init__(self, world, size: int):
        self.rank, self.size, self.folder = world.rank, size, world.folder
        self.group = dist.new_group(range(size))
        self.member = world.rank < size
        self.mesh = DeviceMesh.from_group(self.group, "cpu", list(range(size)), mesh_dim_names=("part",)) \
            if self.member else None


def check_checkpoint_at_another_rank_count(world):
    counts = (1, world.size // 2, world.size) if world.size > 2 else (1, world.size)
    parts = {n: Part(world, n) for n in counts}
    for saving in counts:
        part = parts[saving]
        path = folder(world, f"from {saving}")
        if part.member:
            m = model(part, seed=1)
            optimizer = trained(m, like=m)
            state, optimizer_state = get_state_dict(m, optimizer)
            dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path, process_group=part.group)
        dist.barrier()
        expected = whole_model(seed=1)
        whole_optimizer = trained(expected)
        for loading in counts:
            part = parts[loading]
            if part.member:
                m = model(part, seed=2, layout=1)  # other weights, and other cuts
                optimizer = torch.optim.AdamW(m.parameters(), lr=.1)
                state, optimizer_state = get_state_dict(m, optimizer)
                both = {"model": state, "optimizer": optimizer_state}
                dcp.load(both, checkpoint_id=path, process_group=part.group)
                set_state_dict(m, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
                same_state(m, optimizer, expected, whole_optimizer)
            dist.barrier()
        plain = {f"model.inner.{name}": torch.zeros(shape) for name, shape in SHAPES.items()}
        dcp.load(plain, checkpoint_id=path, no_dist=True)  # what one process reads
        for name, q in expected.inner.named_parameters():
            assert torch.equal(plain[f"model.inner.{name}"], q), name
        dist.barrier()


def fsdp(world, seed: int) -> Model:
    """The parameters as FSDP2 lays them out: Shard(0), and 0-dim ones not at all."""
    return Model({name: distribute_tensor(values(name, seed=seed), world.mesh, [Shard(0)])
                  for name in SHAPES if SHAPES[name]})


def check_checkpoint_from_and_into_fsdp(world):
    for source, target, name in ((fsdp(world, 1), model(world, 2), "from fsdp"),
                                 (model(world, 1), fsdp(world, 2), "into fsdp")):
        for m in (source, target):
            if "scalar" in dict(m.inner.named_parameters()):
                del m.inner.scalar
        dcp.save({"model": source.state_dict()}, checkpoint_id=folder(world, name))
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=folder(world, name))
        target.load_state_dict(state["model"])
        for key, p in target.inner.named_parameters():
            same(p, values(key, seed=1), key)


def check_fsdp2_itself(world):
    """Weights and moments that fully_shard trained go on in sharded tensors, and back."""
    from torch.distributed.fsdp import fully_shard

    def network():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))

    def ragged(network):
        for module in network:
            for name, p in list(module.named_parameters(recurse=False)):
                n = p.numel()
                cuts = [0, *sorted((n * r) // world.size + (r % 2) for r in range(1, world.size)), n]
                runs = tuple(zip(cuts, cuts[1:]))
                begin, end = runs[world.rank]
                local = p.detach().view(-1)[begin:end].clone()
                setattr(module, name, torch.nn.Parameter(sharded_tensor(local, world.mesh, runs, p.shape)))
        return network

    def step(net, optimizer, seed):
        for at, p in enumerate(net.parameters()):
            full = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + at))
            p.grad = from_full(full, p) if isinstance(p, DTensor) else full
        optimizer.step()
        optimizer.zero_grad()  # get_state_dict sets up moments only where there are no gradients

    reference = network()
    optimizers = {}
    nets = {"fsdp": fully_shard(network(), mesh=world.mesh), "ragged": ragged(network()), "reference": reference}
    for name, net in nets.items():
        optimizers[name] = torch.optim.AdamW(net.parameters(), lr=.1)
        step(net, optimizers[name], 1)
    for source, target in (("fsdp", "ragged"), ("ragged", "fsdp")):
        path = folder(world, f"{source} to {target}")
        state, optimizer_state = get_state_dict(nets[source], optimizers[source])
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
        with torch.no_grad():
            for p in nets[target].parameters():
                p.zero_()
        fresh = torch.optim.AdamW(nets[target].parameters(), lr=.1)
        state, optimizer_state = get_state_dict(nets[target], fresh)
        both = {"model": state, "optimizer": optimizer_state}
        dcp.load(both, checkpoint_id=path)
        set_state_dict(nets[target], fresh, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
        optimizers[target] = fresh
    for name, net in nets.items():
        step(net, optimizers[name], 2)
    for p, q, r in zip(*(net.parameters() for net in nets.values())):
        same(p, r)
        same(q, r)


def check_full_state_dicts(world):
    for offload in (False, True):
        for broadcast in (False, True):
            m, expected = model(world, 1), whole_model(1)
            optimizer, whole_optimizer = trained(m, like=m), trained(expected)
            get = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            state = get_model_state_dict(m, options=get)
            moments = get_optimizer_state_dict(m, optimizer, options=get)
            if offload and world.rank:
                assert not state
            else:
                for name, q in expected.state_dict().items():
                    assert type(state[name]) is torch.Tensor and torch.equal(state[name], q), name
                for name, q in expected.named_parameters():
                    for key, value in whole_optimizer.state[q].items():
                        assert torch.equal(moments["state"][name][key], value), (name, key)
            if offload and not broadcast:
                continue  # the other ranks have nothing to set
            fresh = model(world, 2, layout=1)
            fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=.1)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            if broadcast and world.rank:
                state, moments = {}, {}
            storage = [p._local_tensor.data_ptr() for p in fresh.parameters()]
            set_model_state_dict(fresh, state, options=options)
            set_optimizer_state_dict(fresh, fresh_optimizer, moments, options=options)
            assert storage == [p._local_tensor.data_ptr() for p in fresh.parameters()], "loaded in place"
            same_state(fresh, fresh_optimizer, expected, whole_optimizer)
            goes_on(fresh, fresh_optimizer, expected, whole_optimizer)


def check_sharded_state_dicts(world):
    for flat in (False, True):
        m, expected = model(world, 1), whole_model(1)
        optimizer, whole_optimizer = trained(m, like=m), trained(expected)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state, moments = get_state_dict(m, optimizer, options=options)
        for name, p in m.named_parameters():
            layout_kept(state[name], p)
        fresh = model(world, 2)
        fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=.1)
        set_state_dict(fresh, fresh_optimizer, model_state_dict=state, optim_state_dict=moments, options=options)
        same_state(fresh, fresh_optimizer, expected, whole_optimizer)
        goes_on(fresh, fresh_optimizer, expected, whole_optimizer)


def check_async_save(world):
    m, expected = model(world, 1), whole_model(1)
    optimizer, whole_optimizer = trained(m, like=m), trained(expected)
    state, moments = get_state_dict(m, optimizer)
    dist.barrier()
    future = dcp.async_save({"model": state, "optimizer": moments}, checkpoint_id=folder(world, "async"))
    with torch.no_grad():  # training goes on: the checkpoint must not see it
        for p in m.parameters():
            p.add_(100)
            optimizer.state[p]["exp_avg"].add_(100)
    future.result()
    fresh = model(world, 2, layout=1)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=.1)
    state, moments = get_state_dict(fresh, fresh_optimizer)
    both = {"model": state, "optimizer": moments}
    dcp.load(both, checkpoint_id=folder(world, "async"))
    set_state_dict(fresh, fresh_optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    same_state(fresh, fresh_optimizer, expected, whole_optimizer)


def check_meta_tensors_are_loaded(world):
    dcp.save({"model": model(world, 1).state_dict()}, checkpoint_id=folder(world, "meta"))
    state = {}
    for name, shape in SHAPES.items():
        runs = cut(name, shape, world.size, 1)
        begin, end = runs[world.rank]
        state[f"inner.{name}"] = sharded_tensor(torch.empty(end - begin, device="meta"), world.mesh, runs, shape)
        assert state[f"inner.{name}"].full_tensor().is_meta or name == "rows"
    nested = {"model": state}
    dcp.load(nested, checkpoint_id=folder(world, "meta"))
    for name in SHAPES:
        t = nested["model"][f"inner.{name}"]
        assert isinstance(t, ShardedTensor) or name == "rows"
        same(t, values(name, seed=1), name)


def check_checkpoint_errors(world):
    dcp.save({"w": sharded(world, "matrix")}, checkpoint_id=folder(world, "errors"))
    other = sharded(world, "vector")
    raises(CheckpointException, lambda: dcp.load({"w": other}, checkpoint_id=folder(world, "errors")), "Size mismatch")
    same(other, values("vector"))
    m = model(world)
    state = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True))
    state["inner.matrix"] = torch.zeros(7, 5)
    raises(ValueError, lambda: set_model_state_dict(m, state, options=StateDictOptions(full_state_dict=True)), "(7, 5)")
    assert intervals_of(m.inner.matrix) and local_elements(m.inner.matrix).ndim == 1
    same_model(m, whole_model())

"""Parameters while their unit is gathered: writes are refused, state dicts are sharded, unshard and failures."""

import copy
import itertools
import pickle

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from common import expect_error, full
from dovetail import MixedPrecisionPolicy, fully_shard, optim

COMMS = ("c10d", "peer")
X = torch.ones(2, 4)


class Step(nn.Linear):
    """Does with its module what it is told to, in forward."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.act = None

    def forward(self, x):
        if self.act:
            self.act(self)
        return super().forward(x)


def stack(shard=fully_shard, reshards=None, **how):
    """Two units with a root that has a parameter of its own."""
    torch.manual_seed(3)
    model = nn.Sequential(Step(), Step(), Step())
    for m in model[:2]:
        shard(m, reshard_after_forward=reshards, **how)
    return shard(model, **how)


def half(shard):
    return {"mp_policy": (MixedPrecisionPolicy if shard is fully_shard else TorchPolicy)(param_dtype=torch.bfloat16)}


def halve(module):
    with torch.no_grad():
        module.weight.mul_(0.5)


def are_sharded(tensors):
    return all(isinstance(t, DTensor) and t.dtype == torch.float32 for t in tensors)


def written(name, call):
    expect_error(RuntimeError, ["written to while gathered", name, "before the forward", "reshard()"], call)


def step_once(model, x=X):
    model(x).square().sum().backward()
    model.zero_grad()


# Writes.

def check_writes_in_forward(world):
    for comm, how, reshards in itertools.product(COMMS, ({}, half(fully_shard)), (None, False)):
        model = stack(comm=comm, reshards=reshards, **how)
        for at in range(3):
            model[at].act = halve
            for call in (model, torch.no_grad()(model), torch.inference_mode()(model)):
                written(f"{at}.weight", lambda: call(X))
                assert are_sharded(model.parameters()) and not any(u.gathered for u in model._unit().runtime.units)
            model[at].act = None
            step_once(model)
        # A view has its parameter's version; parameters of one unit are told at once.
        model[0].act = lambda m: (m.weight.detach()[1:].zero_(), m.weight.detach().t().fill_(0.0))
        written("0.weight.", lambda: model(X))
        model[0].act = lambda m: nn.init.normal_(m.weight)
        written("0.weight.", lambda: model(X))
        model[0].act = None
        step_once(model)
    # Of a unit that is none of its own, and by an operation that looks like reading.
    for comm in COMMS:
        model = nn.Sequential(nn.Embedding(4, 4, max_norm=0.5), nn.Linear(4, 4))
        fully_shard(model, comm=comm)
        written("0.weight", lambda: model(torch.arange(4)))


def check_writes_between_passes(world):
    for comm in COMMS:
        model = stack(comm=comm)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step_once(model)

        def write(m):
            m.unshard()
            halve(m[2] if m is model else m)

        write(model)
        written("2.weight", model.reshard)
        model.reshard()  # told once
        write(model[0])
        written("0.weight", lambda: model(X))
        step_once(model)
        write(model[0])
        written("0.weight", lambda: model[0].state_dict())
        model[0].reshard()
        write(model[1])
        written("1.weight", optimizer.step)
        model[1].reshard()
        model.set_reshard_after_backward(False)
        write(model[1])
        written("1.weight", model[1].reshard)
        assert are_sharded(model.parameters())
        step_once(model)
        model.set_reshard_after_backward(True)
        step_once(model)


def check_writes_in_backward(world):
    for comm in COMMS:
        model = stack(comm=comm)
        step_once(model)
        whole = []
        model[0].act = lambda m: whole.append(m.weight)
        x = X.clone().requires_grad_()
        out = model(x)
        x.register_hook(lambda g: whole[-1].detach().zero_().sum() * g)
        # Gradients that come last: of the input, when the unit's weight has been read.
        written("0.weight", out.sum().backward)
        assert all(p.grad is not None for p in model.parameters())
        model.zero_grad()
        model[0].act = None
        step_once(model)


def check_writes_to_a_tensor_parallel_parameter(world):
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4 * world.size))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    step_once(model)
    model.unshard()
    halve(model[0])
    written("0.weight", model.reshard)
    step_once(model)


def check_what_does_not_write_is_no_write(world):
    def act(m):
        w = m.weight
        w.detach().t()[1:].sum(), w.view(-1), w.requires_grad_(w.requires_grad), w.clone().zero_(), w.data.norm()
        with torch.no_grad():
            w.mul(2.0).zero_()

    for comm, how in itertools.product(COMMS, ({}, half(fully_shard))):
        model = stack(comm=comm, **how)
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        for m in model:
            m.act = act
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(X).float().square().sum()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(X)
                for p in model.parameters():
                    p.mul_(0.99)
            model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
        for m in model:
            nn.init.normal_(m.weight)
            m.reset_parameters()
        model.unshard()
        act(model[2])
        model.reshard()
        inner = model[1].forward
        for reentrant in (False, True):
            model[1].forward = lambda x: checkpoint(lambda y: F.relu(inner(y)), x, use_reentrant=reentrant)
            step_once(model, X.clone().requires_grad_())
    for reparametrized in (torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.spectral_norm):
        for comm in COMMS:
            model = nn.Sequential(reparametrized(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.LSTM(4, 4))
            fully_shard(model[0], comm=comm)
            fully_shard(model, comm=comm)
            for _ in range(2):
                model(X)[0].sum().backward()
                model.zero_grad()


def check_a_first_forward_in_inference_mode(world):
    mesh = init_device_mesh("cpu", (1, world.size), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(nn.Sequential(nn.Linear(4, 4 * world.size)), mesh["tp"], {"0": ColwiseParallel()})
    for model in (*(stack(comm=comm) for comm in COMMS), fully_shard(parallel, mesh=mesh["dp"])):
        wanted = [full(p).clone() for p in model.parameters()]
        for _ in range(2):
            with torch.inference_mode():
                inferred = model(X)
            assert torch.equal(inferred, model(X).detach())
            model(X).square().sum().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert not any(torch.equal(full(p), w) for p, w in zip(model.parameters(), wanted))
            model.zero_grad()


# State dicts.

def check_state_dicts_are_sharded(world):
    for shard, comm in ((fully_shard, "c10d"), (fully_shard, "peer"), (torch_fully_shard, None)):
        ours = shard is fully_shard
        model = stack(shard, **half(shard), **({"comm": comm} if ours else {}))
        step_once(model)
        wanted = {k: full(v) for k, v in model.state_dict().items()}
        seen = []

        def same(state):
            assert sorted(state) == sorted(wanted) and are_sharded(state.values()), state
            for k, v in state.items():
                assert torch.equal(full(v), wanted[k]), k

        for m in (model, model[0]):
            m.unshard()
        same(model.state_dict())
        same({f"2.{k}": v for k, v in model[2].state_dict().items()} | dict(list(model.state_dict().items())[:2]))
        for m in (model, model[0]):
            m.unshard()
        same(get_model_state_dict(model))
        for m in (model, model[0]):
            m.reshard()
        if not ours:
            continue
        # In the midst of a forward as well, which is not disturbed.
        expected = model(X).detach()
        model[1].act = lambda m: (same(model.state_dict()), seen.append(m.weight))
        out = model(X)
        assert torch.equal(out, expected) and not isinstance(seen[0], DTensor) and seen[0].dtype == torch.bfloat16
        out.sum().backward()
        assert len(list(model.parameters())) == sum(p.grad is not None for p in model.parameters())
        model.zero_grad()
        # keep_vars gives the parameters.
        model.unshard()
        assert all(a is p for a, p in zip(model.state_dict(keep_vars=True).values(), stack_parameters(model)))
        assert not isinstance(model[2].weight, DTensor)
        model.reshard()


def stack_parameters(model):
    return [slot.param for u in model._unit().runtime.units for slot in u.slots]


def check_loading_into_a_gathered_module(world):
    for comm, how in itertools.product(COMMS, ({}, half(fully_shard))):
        model = stack(comm=comm, **how)
        step_once(model)
        double = {k: 2 * v for k, v in model.state_dict().items()}
        for load in (lambda: model.load_state_dict(double),
                     lambda: model[2].load_state_dict({"weight": double["2.weight"]}),
                     lambda: set_model_state_dict(model, double),
                     lambda: set_model_state_dict(model, {k: full(v) for k, v in double.items()},
                                                  options=StateDictOptions(full_state_dict=True))):
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.unshard()
            model[0].unshard()
            load()
            assert torch.equal(full(model[2].weight), full(double["2.weight"]))
            step_once(model)
        model.reshard(), model[0].reshard()
        assert torch.equal(full(model[0].weight), full(double["0.weight"]))
        model[0].act = lambda m: m.load_state_dict({"weight": double["0.weight"]})
        expect_error(RuntimeError, ["load_state_dict", "weight", "between passes"], lambda: model(X))


def check_a_module_below_a_unit_is_copied(world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)))
    expected = list(copy.deepcopy(model[1][0]).state_dict())
    fully_shard(model)
    step_once(model)
    for other in (copy.deepcopy(model[1][0]), pickle.loads(pickle.dumps(model[1][0]))):
        assert list(other.state_dict()) == expected

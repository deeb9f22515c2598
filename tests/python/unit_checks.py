"""What units of one root have of their own: whether they reshard, the dtype of their passes."""

import itertools

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import models
from common import full
from dovetail import MixedPrecisionPolicy, fully_shard, optim

TOKENS = torch.arange(16).view(2, 8)


def decoder(reshards=(None, None, None), root=None, **how):
    torch.manual_seed(6)
    model = models.Decoder()
    for block, reshard in zip(model.blocks, reshards):
        fully_shard(block, reshard_after_forward=reshard, **how)
    return fully_shard(model, reshard_after_forward=root, **how)


def tokens(step):
    """Other data on every rank and at every step."""
    return (TOKENS + 5 * dist.get_rank() + 7 * step) % 64


def trained(model, steps=3):
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model(tokens(step)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, [full(p.detach()) for p in model.parameters()]


def gathered_after_forward(model):
    loss = model(tokens(0)).square().mean()
    kept = [u.gathered for u in (*(b._unit() for b in model.blocks), model._unit())]
    loss.backward()
    model.zero_grad()
    assert not any(u.gathered for u in (*(b._unit() for b in model.blocks), model._unit()))
    return kept


def check_each_unit_reshards_as_it_was_told(world):
    """The last block's backward comes next: it stays unless it is the root that was told to go."""
    for comm in ("c10d", "peer"):
        losses, weights = trained(decoder(comm=comm))
        for reshards, root in (((True, False, None), None), ((False, None, True), True), ((None, None, False), False)):
            model = decoder(reshards, root, comm=comm)
            wanted = [r is False for r in reshards[:2]] + [True, root is not True]
            assert gathered_after_forward(model) == wanted, (reshards, root, gathered_after_forward(model))
            theirs = trained(model)
            assert theirs[0] == losses
            for p, w in zip(theirs[1], weights):
                torch.testing.assert_close(p, w, rtol=0, atol=0)
    # One unit alone, changed later.
    model = decoder()
    assert gathered_after_forward(model) == [False, False, True, True]
    model.blocks[0].set_reshard_after_forward(False)
    assert gathered_after_forward(model) == [True, False, True, True]
    model.blocks[0].set_reshard_after_forward(True)
    model.set_reshard_after_forward(True, recurse=False)
    assert gathered_after_forward(model) == [False, False, True, False]
    assert trained(model)[0] == losses


class Mixed(nn.Module):
    """A norm and a head in fp32 around layers in bf16, as many recipes have them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def mixed(shard, policy, low, root_low, **how):
    torch.manual_seed(9)
    model = Mixed()
    half = policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    single = policy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for m in model.layers:
        shard(m, mp_policy=half if low else single, **how)
    for m in (model.norm, model.head):
        shard(m, mp_policy=single if low else half, **how)
    return shard(model, mp_policy=half if root_low else single, **how)


def check_units_of_two_dtypes_under_one_root(world):
    for low, root_low in itertools.product((True, False), repeat=2):
        theirs = mixed(torch_fully_shard, TorchPolicy, low, root_low)
        batch = tokens(1) % 32
        wanted = theirs(batch)
        wanted.float().square().mean().backward()
        for comm in ("c10d", "peer"):
            model = mixed(fully_shard, MixedPrecisionPolicy, low, root_low, comm=comm)
            seen = []
            for m in (model.layers[0], model.head):
                m.register_forward_pre_hook(lambda m, _: seen.append(next(m.parameters()).dtype))
            output = model(batch)
            kinds = (torch.bfloat16, torch.float32)
            assert seen == [kinds[not low], kinds[low]], seen
            assert output.dtype == wanted.dtype
            torch.testing.assert_close(output, wanted, rtol=0, atol=0)
            output.float().square().mean().backward()
            for (name, p), q in zip(model.named_parameters(), theirs.parameters()):
                assert p.dtype == torch.float32, name
                torch.testing.assert_close(full(p.grad), full(q.grad), rtol=1e-5, atol=1e-7,
                                           msg=lambda s: f"{name}: {s}")
            state = optim.AdamW(model.parameters(), lr=1e-2)
            state.step()
            assert not torch.equal(full(model.head.weight.detach()), full(theirs.head.weight.detach()))

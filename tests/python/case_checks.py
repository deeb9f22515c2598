"""Cases from the field through the Python face; beside each, what torch's own fully_shard does with it."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from common import full, what_torch_does
from dovetail import MixedPrecisionPolicy, fully_shard


# B02: a 0-dim parameter.

class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x.sum() * self.s


def check_b02(world):
    rank, size = world.rank, world.size
    model = fully_shard(Scalar())
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.tensor([1.0, 0.0]) if rank % 2 == 0 else torch.tensor([0.0, 3.0])
    model(x).backward()
    assert full(model.s.grad).item() == 2.0 and model.s.shape == torch.Size([])
    opt.step()
    assert full(model.s).item() == 1.0
    assert sum(world.everyone(model.s.to_local().numel())) == 1
    assert "scalar parameters" in what_torch_does(lambda: torch_fully_shard(Scalar()))


# B03: strides.

class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 6)
        self.linear.weight = nn.Parameter(torch.randn(4, 6).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x, image):
        return self.linear(x).pow(2).mean() + self.conv(image).pow(2).mean()


def check_b03(world):
    rank, size = world.rank, world.size

    def step(model, shares):
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        g = torch.Generator().manual_seed(0)
        data = [(torch.randn(3, 4, generator=g), torch.randn(1, 2, 5, 5, generator=g)) for _ in range(size)]
        loss = sum(model(*data[r]) for r in shares) / (size if len(shares) > 1 else 1)
        loss.backward()
        grads = {n: full(p.grad) for n, p in model.named_parameters()}
        opt.step()
        return grads, {n: full(p.detach()) for n, p in model.named_parameters()}

    reference = step(Strided(), range(size))
    ours = step(fully_shard(Strided()), [rank])
    for a, b in zip(reference, ours):
        for name in a:
            torch.testing.assert_close(b[name], a[name])
    assert "non-contiguous" in what_torch_does(lambda: torch_fully_shard(Strided()))


# B06: tied weights in two units, in either order.

class TiedUnits(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.emb = nn.Embedding(5, 4)
        self.mid = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.mid(self.emb(tokens))))


class Scaled(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(1.0, 5.0))
        self.table = table

    def forward(self, tokens):
        return self.table(tokens) * self.scale


def check_b06(world):
    rank, size = world.rank, world.size

    def run(model, shares):
        opt = torch.optim.AdamW(model.parameters(), lr=0.1)
        data = [torch.arange(r, r + 4) % 5 for r in range(size)]
        loss = sum(F.cross_entropy(model(data[r]), (data[r] + 1) % 5) for r in shares) / len(shares)
        loss.backward()
        grads = {n: full(p.grad).clone() for n, p in model.named_parameters()}
        opt.step()
        return grads, {n: full(p.detach()) for n, p in model.named_parameters()}, len(opt.param_groups[0]["params"])

    reference = run(TiedUnits(), range(size))

    def wrapped(shard, order):
        model = TiedUnits()
        for name in order:
            shard(getattr(model, name))
        return shard(model)

    for order in (["emb", "mid", "head"], ["head", "mid", "emb"], ["emb"], ["head", "mid"]):
        model = wrapped(fully_shard, order)
        ours = run(model, [rank])
        assert ours[2] == reference[2] == 3
        assert model.emb.weight is model.head.weight
        assert {"emb.weight", "head.weight"} <= set(model.state_dict())
        for a, b in zip(reference[:2], ours[:2]):
            for name in a:
                torch.testing.assert_close(b[name], a[name])
    # A shared weight that is not the first of its unit: the others are laid out anew when it is given back.
    def scaled():
        model = TiedUnits()
        model.emb = Scaled(model.emb)
        return model

    reference, model = run(scaled(), range(size)), scaled()
    fully_shard(model.emb)
    fully_shard(model.head)
    ours = run(fully_shard(model), [rank])
    for a, b in zip(reference[:2], ours[:2]):
        for name in a:
            torch.testing.assert_close(b[name], a[name])
    assert "shared" in what_torch_does(lambda: wrapped(torch_fully_shard, ["emb", "mid", "head"])(torch.arange(4)))


# B08: a graph used twice, and gradients of gradients to inputs.

class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def check_b08(world):
    rank, size = world.rank, world.size

    def wrapped(shard):
        model = Smooth()
        shard(model.first)
        return shard(model)

    def once(model):
        model(torch.ones(2, 4) * (rank + 1)).mean().backward()
        return {n: full(p.grad).clone() for n, p in model.named_parameters()}

    single = once(wrapped(fully_shard))
    model = wrapped(fully_shard)
    loss = model(torch.ones(2, 4) * (rank + 1)).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(full(p.grad), 2 * single[n])

    def penalty(model, x):
        x = x.clone().requires_grad_()
        slope, = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).pow(2).mean().backward()
        return {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}

    torch.manual_seed(5)
    x = torch.randn(3, 4)
    reference, ours = penalty(Smooth(), x), penalty(wrapped(fully_shard), x)
    for n in reference:
        assert (ours[n] - reference[n]).norm() <= 1e-5 * (1 + reference[n].norm()), n
    assert "storage" in what_torch_does(lambda: penalty(wrapped(torch_fully_shard), x))


# B10: frozen, thawed and frozen again under mixed precision.

def check_b10(world):
    rank, size = world.rank, world.size

    def run(freezes):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        opt = torch.optim.SGD(model.parameters(), lr=0.0)
        sent = []
        for step in range(3):
            frozen = freezes and step != 1
            model[0].requires_grad_(not frozen)
            before = model._unit().runtime.world.bytes_sent() if step else 0
            opt.zero_grad()
            model(torch.full((2, 8), 1.0 + rank)).float().pow(2).sum().backward()
            if step:
                sent.append(model._unit().runtime.world.bytes_sent() - before)
            assert (model[0].weight.grad is None) == frozen
            opt.step()
            if step == 1:
                grad = full(model[0].weight.grad).clone()
        return grad, sent

    thawed, sent = run(True)
    always, _ = run(False)
    assert thawed.dtype == torch.float32
    assert (thawed - always).norm() <= 2e-2 * always.norm()
    assert size == 1 or sent[1] < sent[0], sent  # step 3 reduces nothing of the frozen unit

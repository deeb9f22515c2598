"""Parameters of a unit that are used behind the units below it (heads): reduced on their own, as soon as written."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

import dovetail
from common import full
from dovetail import Plan, fully_shard

VOCABULARY, WIDTH, STEPS = 256, 16, 4


class Model(nn.Module):
    """An embedding, blocks, a norm and a head that is larger than the blocks are."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
                                    for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)

    def forward(self, tokens, step):
        return F.cross_entropy(self.head(self.hidden(tokens)), tokens)


class HeadInPieces(Model):
    """The head inside of reentrant checkpoints, for a part of the batch each: its leaves are done once for each."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()  # nothing behind the blocks but what is in pieces

    def forward(self, tokens, step):
        def loss(x, y):
            return F.cross_entropy(self.head(x), y, reduction="sum")

        parts = zip(self.hidden(tokens).chunk(3), tokens.chunk(3))
        return sum(checkpoint(loss, x, y, use_reentrant=True) for x, y in parts) / len(tokens)


class HeadNowAndThen(Model):
    """A head that every second step does without, on all ranks or, where `one` is set, on one of them."""

    one = False

    def forward(self, tokens, step):
        hidden = self.hidden(tokens)
        without = step % 2 == 1 and (not self.one or dist.get_rank() == 0)
        return hidden.square().mean() if without else F.cross_entropy(self.head(hidden), tokens)


class HeadFirst(Model):
    """What is registered last is used first: it looks like a head, and its gradients come last."""

    def forward(self, tokens, step):
        x = F.linear(self.embedding(tokens), self.head.weight[:WIDTH])
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x).square().mean() + self.head.bias.sum()


class HeadTwice(Model):
    """Its weight also before the blocks."""

    def forward(self, tokens, step):
        x = F.embedding(tokens, self.head.weight)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)), tokens)


class Inside(nn.Module):
    """A model that is a part of another, between layers of that one."""

    def __init__(self):
        super().__init__()
        self.model = Model()
        self.scale = nn.Linear(VOCABULARY, VOCABULARY)

    def forward(self, tokens, step):
        return F.cross_entropy(self.scale(self.model.head(self.model.hidden(tokens))), tokens)


def tokens(step):
    return torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def build(cls, shard, swap=False, **how):
    torch.manual_seed(3)
    model = cls()
    if swap:
        dovetail.nn.swap_linears(model)
    inner = getattr(model, "model", model)
    for block in inner.blocks:
        shard(block, **how)
    if inner is not model:
        shard(inner, **how)
        dovetail.register_fsdp_forward_method(inner, "hidden")
    return shard(model, **how)


def trained(model, micro_batches=1):
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1) if micro_batches > 1 else None
            loss = model(tokens(step + 50 * i), step)
            loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            model(tokens(0), 0)
    return losses, [full(p.detach()) for p in model.parameters()]


def same(got, wanted, what):
    for a, b in zip(got[0], wanted[0], strict=True):
        assert abs(a - b) < 1e-5 * max(1, abs(b)), (what, got[0], wanted[0])
    for a, b in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda s: f"{what}: {s}")


def check_models_train_as_torchs(world):
    for cls in (Model, HeadInPieces, HeadNowAndThen, HeadFirst, HeadTwice):
        wanted = trained(build(cls, torch_fully_shard))
        for how in ({"comm": "c10d"}, {"comm": "peer"}, {"reshard_after_forward": True}, {"plan": Plan(zero3=1)},
                    {"swap": True}, {"plan": Plan(zero1=0, zero2=1, zero3=1)}):
            model = build(cls, fully_shard, **how)
            assert [s.name for s in model._unit().behind.slots][-2:] == ["head.weight", "head.bias"]
            same(trained(model), wanted, (cls.__name__, how))
    wanted = trained(build(Model, torch_fully_shard), micro_batches=2)
    for comm in ("c10d", "peer"):
        same(trained(build(Model, fully_shard, comm=comm), micro_batches=2), wanted, ("micro-batches", comm))


def check_a_head_that_one_rank_does_without(world):
    """The others' collectives and this one's are the same ones. (torch's waits for ever here.)"""
    class One(HeadNowAndThen):
        one = True

    runs = [trained(build(One, fully_shard, comm=comm)) for comm in ("c10d", "peer")]
    same(*runs, "one rank without")


def check_a_unit_inside_has_a_part_of_its_own_too(world):
    wanted = None
    for comm in ("c10d", "peer"):
        model = build(Inside, fully_shard, comm=comm)
        inner = model.model._unit()
        assert inner.behind is not None and model._unit().behind is not None
        register_head(model)
        run = trained(model)
        wanted = wanted or run
        same(run, wanted, comm)
    plain = Inside()
    torch.manual_seed(3)
    plain = Inside()
    for p in plain.parameters():
        dist.broadcast(p.detach(), 0)
    opt = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(STEPS):
        loss = plain(tokens(step), step)
        loss.backward()
        for p in plain.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world.size
        opt.step()
        opt.zero_grad()
    same(([], wanted[1]), ([], [p.detach() for p in plain.parameters()]), "plain")


def register_head(model):
    """forward of Inside calls the inner head: as one method of the inner unit."""
    inner = model.model

    def both(self, tokens):
        return self.head(type(self).hidden(self, tokens))

    type(inner).both = both
    dovetail.register_fsdp_forward_method(inner, "both")
    model.forward = lambda tokens, step: F.cross_entropy(model.scale(inner.both(tokens)), tokens)


def check_it_is_reduced_before_the_blocks(world):
    """From the second step on, when a backward pass has shown that it is written before them; never a false head."""
    for cls, early in ((Model, True), (HeadInPieces, False), (HeadFirst, False), (HeadTwice, False)):
        model = build(cls, fully_shard, comm="c10d", plan=Plan(zero3=1))  # nothing but reductions is sent in backward
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        sent = []
        for step in range(3):
            handle = model.blocks[0].register_full_backward_pre_hook(
                lambda m, g: sent.append(model._unit().runtime.world.bytes_sent() - before))
            loss = model(tokens(step), step)
            before = model._unit().runtime.world.bytes_sent()
            loss.backward()
            handle.remove()
            opt.step()
            opt.zero_grad()
        assert [s > 0 for s in sent] == [False, early, early], (cls.__name__, sent)


def check_small_parts_and_what_is_shared_stay(world):
    """A norm is not worth a reduction of its own; a weight that is an embedding too is used in front."""
    class Small(Model):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, 2)

    class Tied(Model):
        def __init__(self):
            super().__init__()
            self.head.weight = self.embedding.weight

    assert build(Small, fully_shard)._unit().behind is None
    tied = build(Tied, fully_shard)
    assert tied._unit().behind is None
    same(trained(tied), trained(build(Tied, torch_fully_shard)), "tied")


def check_calls_on_the_unit_reach_both_parts(world):
    model = build(Model, fully_shard)
    wanted = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
    model(tokens(0), 0).backward()
    model.zero_grad()
    model.unshard()
    for name in ("embedding.weight", "head.weight"):
        assert type(model.get_parameter(name)) is nn.Parameter and model.get_parameter(name).shape == wanted[name].shape
        torch.testing.assert_close(model.get_parameter(name).detach(), wanted[name], rtol=0, atol=0)
    model.reshard()
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    try:  # an error in the forward leaves both parts as they were
        model(torch.full((2,), VOCABULARY), 0)
        raise AssertionError("an index beyond the embedding was taken")
    except IndexError:
        pass
    for _ in range(2):
        model(tokens(0), 0).backward()
    model.zero_grad()
    model.set_reshard_after_forward(True, recurse=False)
    model(tokens(0), 0).backward()
    assert set(model.state_dict()) == set(wanted)

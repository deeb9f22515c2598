"""Models trained with dovetail.fully_shard and with torch's: the same losses and weights."""

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dovetail
import models
from common import full


def weights_of(model):
    return {name: full(p.detach()).clone() for name, p in model.named_parameters()}


def batch_of(kind, step, rank):
    g = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "tokens":
        tokens = torch.randint(0, 40, (2, 9), generator=g)
        return tokens[:, :-1], tokens[:, 1:]
    if kind == "images":
        return torch.randn(4, 3, 8, 8, generator=g), torch.randint(0, 5, (4,), generator=g)
    return torch.randn(4, 32, generator=g), torch.randn(4, 32, generator=g)


def loss_of(kind, output, target):
    if kind == "vectors":
        return F.mse_loss(output.float(), target)
    return F.cross_entropy(output.float().flatten(0, -2), target.flatten())


CASES = {
    "mlp": (models.Mlp, "vectors", lambda m: list(m.layers)),
    "convolutions": (models.Convolutions, "images", lambda m: [m.body]),
    "decoder": (models.Decoder, "tokens", lambda m: list(m.blocks)),
    "tied": (models.Tied, "tokens", lambda m: [m.block]),
}


def train(case, rank, shard, optimizer, steps=10, clip=None, **how):
    make, kind, blocks = CASES[case]
    torch.manual_seed(7)
    model = make()
    if shard is not None:
        for block in blocks(model):
            shard(block, **how)
        shard(model, **how)
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for step in range(steps):
        x, y = batch_of(kind, step, rank)
        loss = loss_of(kind, model(x), y)
        opt.zero_grad()  # after the forward, as many scripts have it
        loss.backward()
        if clip:
            norms.append(float(full(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))))
        opt.step()
        losses.append(loss.item())
    return losses, norms, weights_of(model)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def compare(rank, case, options, tolerance):
    ours_how, theirs_how = {}, {}
    if options.get("bf16"):
        if options.get("by_format"):
            ours_how["format"] = "bf16"
        else:
            ours_how["mp_policy"] = dovetail.MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                                  reduce_dtype=torch.float32)
        theirs_how["mp_policy"] = TorchPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours_how["comm"] = options.get("comm", "auto")
    optimizer = {"adamw": adamw, "sgd": sgd}[options.get("optimizer", "sgd")]
    clip = options.get("clip")
    ours = train(case, rank, dovetail.fully_shard, optimizer, clip=clip, **ours_how)
    theirs = train(case, rank, torch_fully_shard, optimizer, clip=clip, **theirs_how)
    for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1]):
        assert abs(a - b) <= tolerance * max(1, abs(b)), (case, options, ours[:2], theirs[:2])
    assert ours[2].keys() == theirs[2].keys(), (ours[2].keys(), theirs[2].keys())
    for name, w in theirs[2].items():
        difference = (ours[2][name] - w).norm() / w.norm().clamp_min(1e-6)
        assert difference <= tolerance, (case, options, name, float(difference))


def check_sgd_on_every_model(world):
    for case in CASES:
        compare(world.rank, case, {"optimizer": "sgd"}, 2e-6)


def check_adamw_with_clipping(world):
    compare(world.rank, "mlp", {"optimizer": "adamw", "clip": 0.05}, 1e-4)


def check_messages_over_gloo(world):
    compare(world.rank, "decoder", {"optimizer": "sgd", "clip": 0.5, "comm": "c10d"}, 2e-6)


def check_bf16(world):
    compare(world.rank, "decoder", {"bf16": True}, 2e-2)
    compare(world.rank, "mlp", {"bf16": True, "by_format": True}, 2e-2)

"""The heap of CPU tensors that fully_shard switches on."""

import gc

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

import dovetail
import ranks
from dovetail import fully_shard, memory

WIDE = 512


def wide_model():
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDE, WIDE), nn.GELU()) for _ in range(3)))
    for part in model:
        fully_shard(part)
    return fully_shard(model)


def train(steps=3):
    model = wide_model()
    optimizer = dovetail.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(256, WIDE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_activations_lie_in_it(world):
    model = wide_model()
    batch = torch.randn(256, WIDE)
    model(batch).mean().backward()
    before = memory.heap_use()
    output = model(batch)
    now = memory.heap_use()
    activation = 256 * WIDE * 4
    assert now.in_use >= before.in_use + 4 * activation, (before, now)
    assert now.most_in_use >= now.in_use and now.held >= now.in_use, now
    output.mean().backward()
    del output
    assert memory.heap_use().in_use <= before.in_use + activation, (before, memory.heap_use())


def check_weights_before_the_first_forward_leave_it(world):
    """From then on they lie in the engine's memory: those that stock DTensors are over too."""
    memory.use_tensor_heap(True)
    gc.collect()
    before = memory.heap_use()
    model = fully_shard(nn.Linear(WIDE, WIDE * world.size, bias=False))
    assert type(model.weight) is DTensor and memory.heap_use().in_use >= before.in_use + 4 * WIDE * WIDE
    model(torch.randn(2, WIDE)).mean().backward()
    assert memory.heap_use().in_use <= before.in_use, (before, memory.heap_use())


def check_losses_do_not_depend_on_it(world):
    with_heap = train()
    memory.use_tensor_heap(False)
    try:
        before = memory.heap_use().in_use
        without = train()
        assert memory.heap_use().in_use <= before, (before, memory.heap_use())
    finally:
        assert memory.use_tensor_heap(True)
    assert with_heap == without, (with_heap, without)


def check_pages_are_released(world):
    assert memory.use_tensor_heap(True)
    kept = torch.ones(1 << 20)
    del kept
    before = memory.heap_use()
    memory.release_pages()
    use = memory.heap_use()
    assert use.held < before.held and use.in_use == before.in_use, (before, use)


def check_the_profiler_sees_it(world):
    assert memory.use_tensor_heap(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        torch.empty(1 << 20)
    allocated = [e.self_cpu_memory_usage for e in profile.key_averages() if e.key == "aten::empty"]
    assert allocated and allocated[0] == 4 << 20, allocated


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return torch.full((1 << 16,), float(i))


def check_workers_of_a_data_loader_use_it(world):
    large = torch.full((1 << 18,), 5.0)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    got = [batch[:, 7].tolist() for batch in loader]
    assert got == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], got
    assert large.sum().item() == 5.0 * (1 << 18)


ALONE = """
import os, sys, torch, torch.nn as nn, torch.distributed as dist
import dovetail
from dovetail import memory
assert memory.heap_use() is None
memory.release_pages()
if sys.argv[1] == "refused":
    assert memory.use_tensor_heap(False) is False
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(512, 512)
try:
    dovetail.fully_shard(model, comm="no such")
except ValueError:
    assert memory.heap_use() is None
dovetail.fully_shard(model)(torch.randn(256, 512)).mean().backward()
print(memory.heap_use())
dovetail.close_worlds()
dist.destroy_process_group()
"""


def check_users_may_refuse_it(world):
    if dist.get_rank() == 0:
        assert ranks.alone(ALONE, "refused") == "None"
        assert ranks.alone(ALONE, "asked").startswith("HeapUse(in_use=")

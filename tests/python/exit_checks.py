"""The end of a process that has sharded a model."""

import ranks

SCRIPT = """
import atexit, os, sys


def look():
    names = [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
    if "pt_gloo_runloop" in names:
        print("threads of a process group at the end:", names, file=sys.stderr)
        os._exit(3)


atexit.register(look)  # earlier than dovetail's own, so called after it
import torch, torch.nn as nn, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import dovetail

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
mesh = init_device_mesh("cpu", (1,))
for part, where in zip(model, (None, None, mesh)):
    dovetail.fully_shard(part, mesh=where)
dovetail.fully_shard(model)
optimizer = dovetail.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""


def check_no_thread_of_a_group_outlives_the_interpreter(world):
    """Gloo's threads let the tensors of the last operation go when they come to it: without an interpreter they abort
    the process. Each mesh holds its group, beyond destroy_process_group()."""
    if world.rank == 0:
        ranks.alone(SCRIPT)

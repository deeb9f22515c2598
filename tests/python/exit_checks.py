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


TWO_RANKS = """
import os, sys, time
import torch, torch.nn as nn, torch.distributed as dist
import dovetail

rank, comm, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{comm}{len(sys.argv)}", 2), rank=rank, world_size=2)
model = dovetail.fully_shard(nn.Linear(4, 4), comm=comm)
"""

FORK = TWO_RANKS + """
model(torch.ones(2, 4)).sum().backward()
child = os.fork()
if child == 0:
    sys.exit(7)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
assert ended and os.waitstatus_to_exitcode(status) == 7, (ended, status)
model(torch.ones(2, 4)).sum().backward()
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
"""

LATE = TWO_RANKS + """
dovetail.set_deadline(2)
if rank == 1:
    time.sleep(6)
start = time.monotonic()
try:
    model(torch.ones(2, 4))
except Exception as error:
    assert rank == 1 or "missing: rank 1" in str(error), error
else:
    raise AssertionError(f"rank {rank} has waited")
assert time.monotonic() - start < 5
os._exit(0)
"""


def check_a_child_of_fork_that_exits(world):
    """It has no threads of the world that it could join, and leaves the parent's connections alone."""
    for comm in ("peer", "c10d"):
        if world.rank < 2 <= world.size:
            ranks.alone(FORK, world.rank, comm, world.folder)


def check_the_deadline_counts_for_the_first_meeting(world):
    if world.rank < 2 <= world.size:
        ranks.alone(LATE, world.rank, "auto", world.folder, "late")

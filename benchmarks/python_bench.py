"""One training step of the rivals' own Python model under dovetail.fully_shard; rank 0 appends one JSON line.

    torchrun --nproc-per-node 2 benchmarks/python_bench.py --system dovetail_py_peer --size S --out results.jsonl

Systems: dovetail_py with _peer for shared memory (else Gloo), _bf16 for bf16 passes, _linear for linears that write
their gradients, _torch for torch's fused AdamW instead of dovetail.optim's, _muon for Muon on the blocks' matrices.
Figures are taken as the rivals' script and step_bench take theirs.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
parser = argparse.ArgumentParser()
parser.add_argument("--system", default="dovetail_py")
parser.add_argument("--size", default="S")
parser.add_argument("--bs", type=int, default=1)
parser.add_argument("--seq", type=int, default=256)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--warm", type=int, default=3)
parser.add_argument("--out", default="")
parser.add_argument("--rivals", default=os.path.join(ROOT, "../shared/rivals"))
A = parser.parse_args()
sys.path[:0] = [os.path.join(ROOT, "python"), A.rivals]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from model import SIZES, batch, build  # noqa: E402

import dovetail  # noqa: E402

torch.set_num_threads(1)


def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024


def proportional():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024


def sent_on_loopback():
    for line in open("/proc/net/dev"):
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])


class ProportionalPeak(threading.Thread):
    """Looks every few milliseconds at the resident set with shared pages divided among their ranks."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mib, self.on = 0.0, True
        self.start()

    def run(self):
        while self.on:
            self.mib = max(self.mib, proportional())
            time.sleep(0.005)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(4))
peer = "peer" in A.system
base = proportional() if peer else status("VmRSS")

model = build(A.size, A.seq)
if "linear" in A.system:
    dovetail.nn.swap_linears(model)
how = {"comm": "peer" if peer else "c10d"}
if "bf16" in A.system:
    how["mp_policy"] = dovetail.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    dovetail.fully_shard(block, **how)
dovetail.fully_shard(model, **how)
if "torch" in A.system:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
elif "muon" in A.system:  # as the rivals group them: heads and embeddings are AdamW's
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks." in n]
    rest = [p for n, p in model.named_parameters() if not (p.dim() == 2 and "blocks." in n)]
    optimizer = dovetail.optim.Composed([{"params": hidden, "optimizer": "muon"},
                                         {"params": rest, "optimizer": "adamw", "betas": (0.9, 0.95)}],
                                        lr=1e-3, weight_decay=0.1)
else:
    optimizer = dovetail.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

forward, backward, update, total, sent, losses = [], [], [], [], [], []
sampler = None
looked_at = 2 if peer else 0  # steps more, not timed: looking takes time
for step in range(A.steps + looked_at):
    if step == A.steps:
        sampler = ProportionalPeak()
    x, y = batch(step, rank, A.bs, A.seq, SIZES[A.size]["vocab"])
    if step == 2:
        open("/proc/self/clear_refs", "w").write("5")
    dist.barrier()
    n0, t0 = sent_on_loopback(), time.perf_counter()
    loss = model(x, y)
    t1 = time.perf_counter()
    loss.backward()
    t2 = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t3 = time.perf_counter()
    dist.barrier()
    if step >= A.steps:
        continue
    sent.append((sent_on_loopback() - n0) / world)
    forward.append(t1 - t0), backward.append(t2 - t1), update.append(t3 - t2), total.append(t3 - t0)
    losses.append(loss.item())
mine = (sampler.mib if sampler else status("VmHWM"), base, losses)
if sampler:
    sampler.on = False
everyone = [None] * world
dist.all_gather_object(everyone, mine)
if rank == 0:
    def tail(values):
        return statistics.median(values[A.warm:])

    loss = [sum(e[2][i] for e in everyone) / world for i in range(A.steps)]
    line = dict(system=A.system, size=A.size, world=world, step=tail(total), fwd=tail(forward), bwd=tail(backward),
                opt=tail(update), tx_MiB_rank=tail(sent) / 2**20, rss_base=sum(e[1] for e in everyone) / world,
                rss_max=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                rss_peak_steady=max(e[0] for e in everyone), rss_before_model=base, loss=loss, T=total, O=update)
    if A.out:
        open(A.out, "a").write(json.dumps(line) + "\n")
    print(f"{A.system} {A.size} N={world} step {1e3 * line['step']:.1f} ms (f {1e3 * line['fwd']:.0f} "
          f"b {1e3 * line['bwd']:.0f} o {1e3 * line['opt']:.0f}) tx {line['tx_MiB_rank']:.1f} MiB growth "
          f"{line['rss_peak_steady'] - line['rss_base']:.0f} loss {loss[0]:.4f} {loss[-1]:.4f}", flush=True)
dist.barrier()
dovetail.close_worlds()
dist.destroy_process_group()

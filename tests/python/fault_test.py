"""Cases from the field in which ranks die or go different ways; beside each, what torch's own fully_shard does.

Run with `python tests/python/main.py fault_test`. The ranks are processes of their own, since they end with an error.
"""

import contextlib
import datetime
import logging
import multiprocessing
import os
import pathlib
import resource
import signal
import tempfile
import time
import traceback
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import dovetail
from dovetail.checkpoint import load_checkpoint, save_checkpoint

LIMIT = 4.0  # seconds that a rank waits for others; on torch's calls twice as many, so that dovetail's end first
ROOM = 64 << 10  # bytes of a file, after which a rank that dies while it writes one does so
RANKS = 2


def on_ranks(part, *arguments) -> list[tuple[int, str]]:
    """Runs part(rank, *arguments) on processes. Returns each one's exit code and what it printed."""
    context = multiprocessing.get_context("forkserver")  # torch is imported once
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_rank, args=(part, rank, folder, arguments)) for rank in range(RANKS)]
        try:
            for p in processes:
                p.start()
            for p in processes:
                p.join(60)
        finally:
            for p in processes:
                p.kill()
        return [(p.exitcode, pathlib.Path(folder, f"said-{rank}").read_text()) for rank, p in enumerate(processes)]


def _rank(part, rank: int, folder: str, arguments: tuple) -> None:
    said = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # torch's own account of missing files
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS,
                            timeout=datetime.timedelta(seconds=2 * LIMIT))
    dovetail.set_deadline(LIMIT)
    start = time.monotonic()
    try:
        part(rank, *arguments)
    except BaseException:
        traceback.print_exc()
        print(f"failed after {time.monotonic() - start:.1f} s", flush=True)
        os._exit(1)
    print("finished", flush=True)


def sharded(shard, width: int):
    """A model of two units."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for layer in model:
        shard(layer)
    return shard(model)


# B24: another number of micro-batches on one rank.

def uneven(rank: int, shard) -> None:
    model = sharded(shard, 4)
    for _ in range(2 if rank == 0 else 1):
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()


# B20: a checkpoint that is broken off. Each kind: save(model, optimizer, folder, step), and load(model, optimizer,
# folder), which returns the step, 0 for nothing, and says what it passed over. case_state_checks.py has the damages.

def dcp_state(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))


def dcp_save(model, optimizer, folder, step):
    dcp.save(dcp_state(model, optimizer), checkpoint_id=f"{folder}/{step}")


def dcp_load(model, optimizer, folder):
    for step in (20, 10):
        loaded = dcp_state(model, optimizer)
        with contextlib.suppress(FileNotFoundError):
            try:
                dcp.load(loaded, checkpoint_id=f"{folder}/{step}")
            except dcp.api.CheckpointException as e:
                print(f"passed over: {e}")
                continue
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            return step
    return 0


def own_save(model, optimizer, folder, step):
    save_checkpoint(model, optimizer, folder)


def own_load(model, optimizer, folder):
    loaded = load_checkpoint(model, optimizer, folder)
    for said in loaded.passed_over:
        print(f"passed over: {said}")
    return loaded.step


KINDS = {
    "dovetail.checkpoint": (dovetail.fully_shard, own_save, own_load),
    "dovetail and torch.distributed.checkpoint": (dovetail.fully_shard, dcp_save, dcp_load),
    "torch": (torch_fully_shard, dcp_save, dcp_load),
}


def train(rank: int, kind: str, folder: str, resumed: bool) -> None:
    """20 steps with a checkpoint after 10 and after 20. The first attempt breaks the second one off."""
    shard, save, load = KINDS[kind]
    torch.set_printoptions(precision=8)
    model = sharded(shard, 128)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = load(model, optimizer, folder) if resumed else 0
    print(f"begins after {first}")
    for step in range(first + 1, 21):
        model(torch.full((2, 128), rank + step / 10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            weights = [p.full_tensor().detach() for p in model.parameters()]
            print("weights", sum(w.double().sum().item() for w in weights), flush=True)
            if rank == RANKS - 1 and not resumed:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process, in the middle of its file
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
        if step % 10 == 0:
            save(model, optimizer, folder, step)


def line(said: str, start: str) -> str:
    return next((text for text in said.splitlines() if text.startswith(start)), "")


class Faults(unittest.TestCase):
    def test_b24_uneven_micro_batches(self):
        (first, said), (second, _) = on_ranks(uneven, dovetail.fully_shard)
        self.assertEqual((first, second), (1, 1), said)
        self.assertRegex(said, "CommError: .*forward pass of root, step 0.* no answer within 4000 ms from rank 1")
        self.assertLess(float(line(said, "failed after").split()[2]), 4 * LIMIT)
        for code, said in on_ranks(uneven, torch_fully_shard):  # ends as well, and does not say who is missing
            self.assertEqual(code, 1, said)
            self.assertIn("Timed out waiting 8000ms", said)
            self.assertNotIn("rank 1", said.split("Error")[-1])

    def test_b20_checkpoint_broken_off(self):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as folder, self.subTest(kind):
                (code, said), (killed, _) = on_ranks(train, kind, folder, False)
                self.assertEqual((code, killed), (1, -signal.SIGXFSZ), said)
                if kind == "dovetail.checkpoint":
                    self.assertRegex(said, r"(FileError|CommError): .*rank 1\b")
                weights = line(said, "weights")
                self.assertTrue(weights)
                good = {f: f.read_bytes() for f in pathlib.Path(folder).glob("*10/*")}
                self.assertTrue(good)
                for code, said in on_ranks(train, kind, folder, True):
                    self.assertEqual(code, 0, said)
                    self.assertRegex(said, r"(?s)passed over: .*20[/:]")
                    self.assertIn("begins after 10\n", said)
                    self.assertEqual(line(said, "weights"), weights)
                self.assertEqual(good, {f: f.read_bytes() for f in good})


if __name__ == "__main__":
    unittest.main()

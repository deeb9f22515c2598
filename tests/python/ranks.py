"""Runs checks on several processes over Gloo, and reports them one by one."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LOST = ("Connection closed by peer", "CommError")  # the other rank's error says more
TIMEOUT = timedelta(seconds=20)


def run(checks, ranks: int) -> dict[str, str]:
    """Runs every check(world) on `ranks` processes. Returns module.name -> "" or what went wrong, of the worst rank."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ([(c.__module__, c.__name__) for c in checks], ranks, folder)
        context = mp.start_processes(_rank, arguments, ranks, join=False, start_method="spawn")
        while not _joined(context):
            pass
        results = {}
        for rank in range(ranks):
            file = pathlib.Path(folder, f"{rank}.json")
            mine = json.loads(file.read_text()) if file.exists() else {}
            for name in (f"{c.__module__}.{c.__name__}" for c in checks):
                said = mine.get(name, "did not run")
                if said:
                    said = f"rank {rank} of {ranks}: {said}"
                if not results.get(name) or said and _lost(results[name]) and not _lost(said):
                    results[name] = said
    return results


class Checks(unittest.TestCase):
    """Tests whose parts are the check_... functions of modules."""

    def on(self, size: int, *modules) -> None:
        checks = [f for m in modules for name, f in vars(m).items()
                  if name.startswith("check_") and f.__module__ == m.__name__]
        self.assertTrue(checks)
        for name, error in run(checks, size).items():
            with self.subTest(check=name, ranks=size):
                if error:
                    self.fail(error)


def _lost(said: str) -> bool:
    return any(mark in said for mark in LOST)


def _joined(context) -> bool:
    try:
        return context.join()
    except Exception:  # the ranks' files say more
        return True


def alone(script: str, *arguments: object) -> str:
    """Runs a script in a process of its own and returns what it printed; raises with its errors where it fails."""
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class World:
    """What a check gets: rank, size, and a folder that all ranks see."""

    def __init__(self, rank: int, size: int, folder: str):
        from torch.distributed.device_mesh import init_device_mesh
        self.rank, self.size, self.folder = rank, size, folder
        self.mesh = init_device_mesh("cpu", (size,))

    def everyone(self, value) -> list:
        """The value that each rank has."""
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def _rank(rank: int, names: list, size: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_CPP_LOG_LEVEL="FATAL")
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    world = World(rank, size, folder)
    results = {}
    verdicts = dist.FileStore(os.path.join(folder, "verdicts"), size)
    for module, name in names:
        check = getattr(sys.modules[module] if module in sys.modules else __import__(module), name)
        name = f"{module}.{name}"
        if "dovetail._ranks" in sys.modules:
            sys.modules["dovetail"].set_deadline(60)
        torch.manual_seed(7)
        start = time.monotonic()
        try:
            check(world)
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        if rank == 0 and os.environ.get("RANKS_VERBOSE"):
            print(f"{size} ranks  {name:70} {time.monotonic() - start:6.2f} s", flush=True)
        pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(results))
        # A check that fails on some ranks only leaves collectives half done: nothing after it would mean anything.
        verdicts.set(f"{name}/{rank}", "failed" if results[name] else "passed")
        said = {verdicts.get(f"{name}/{other}") for other in range(size)}
        if len(said) > 1:
            os._exit(1)
    if "dovetail._ranks" in sys.modules:
        sys.modules["dovetail"].close_worlds()
    dist.destroy_process_group()

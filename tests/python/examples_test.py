"""The scripts of examples/python, run as their readers run them: alone and under torchrun, a few steps long.

Run with `python tests/python/main.py examples_test`.
"""

import ctypes
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping

import torch
import torch.distributed.checkpoint as dcp

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
SECONDS = 120  # for one script on a busy machine; about 10 on an idle one
SEQUENCE = 48
PR_SET_PDEATHSIG = 1


def run(name: str, ranks: int, *options: str) -> str:
    """What the script printed on rank 0. It must end with 0, in time."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    if ranks > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return finish(command, os.environ)


def finish(command: list[str], environment: Mapping[str, str], folder: str | None = None) -> str:
    """What a command printed, in the folder. It must end with 0, in time."""
    environment = {**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUTF8": "1"}
    process = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               encoding="utf-8", preexec_fn=end_with_the_test)
    try:
        out, errors = process.communicate(timeout=SECONDS)
    finally:
        process.terminate()  # not kill: torchrun then ends the ranks, which are in sessions of their own
        process.wait()
    if process.returncode != 0:
        raise AssertionError(f"{' '.join(command)} ended with {process.returncode}:\n{out}\n{errors}")
    return out


def end_with_the_test() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def loss(out: str, when: str) -> float:
    return float(re.search(rf"^validation {when}: .*?(\d+\.\d+)", out, re.MULTILINE)[1])


def sample(out: str) -> str:
    return out.split("sample:\n", 1)[1].split("\ncheckpoint in ", 1)[0].rstrip("\n")


def module(name: str):
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


class Examples(unittest.TestCase):
    def trained(self, name: str, ranks: int, falls_to: float, *options: str, steps: int = 20) -> str:
        """Runs the script. Its loss must fall, to the part `falls_to` of what it was or below."""
        out = run(name, ranks, f"--steps={steps}", *options)
        self.assertIn(f"on {ranks} rank(s)", out)
        self.assertEqual(len(re.findall(r"^step +\d+/", out, re.MULTILINE)), 10, out)
        before, after = loss(out, "before"), loss(out, "after")
        self.assertLess(after, falls_to * before, out)
        return out

    def check_text(self, name: str) -> set[str]:
        """Two ranks train; a model of one process, which knows nothing of shards, then writes what they wrote.

        Returns the names in the checkpoint.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = self.trained(name, 2, 0.75, "--batch=4", f"--sequence={SEQUENCE}", f"--save={folder}/saved")
            model = module(name).build(SEQUENCE)
            self.assertNotEqual(written(model), sample(out))
            load(model, folder + "/saved")
            self.assertEqual(written(model), sample(out))
            return set(dcp.FileSystemReader(folder + "/saved").read_metadata().state_dict_metadata)

    def test_gpt2(self):
        names = self.check_text("gpt2")
        moments = {name for name in names if name.startswith("optimizer.state.") and name.endswith(".exp_avg")}
        weights = dict(module("gpt2").build(SEQUENCE).named_parameters())
        self.assertEqual(moments, {f"optimizer.state.{name}.exp_avg" for name in weights})

    def test_llama(self):
        self.check_text("llama")

    def test_mixtral(self):
        self.check_text("mixtral")

    def test_dit(self):
        from PIL import Image
        with tempfile.TemporaryDirectory() as folder:
            out = self.trained("dit", 2, 0.5, "--batch=8", f"--save={folder}/saved")
            with Image.open(f"{folder}/saved/sample.png") as image:
                drawn = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width)
            dit = module("dit")
            model = dit.build()
            load(model, folder + "/saved")
        self.assertEqual(len(sample(out).splitlines()), dit.SIDE)
        again = dit.sample(model, "DOVETAIL")  # by one process
        # Pixels were rounded down to whole ones of 256.
        torch.testing.assert_close((again + 1) * 127.5, drawn.float() + 0.5, atol=0.6, rtol=0)

    def test_alone_in_bf16(self):
        self.trained("gpt2", 1, 0.75, "--batch=8", f"--sequence={SEQUENCE}", "--format=bf16")


def load(model, folder: str) -> None:
    """Puts a checkpoint's weights into a model that is whole."""
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])


def written(model) -> str:
    return module("training").sample(model).rstrip("\n")


if __name__ == "__main__":
    unittest.main()

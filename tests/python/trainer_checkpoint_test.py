"""A checkpoint of the C++ trainer goes on in Python, on transformers' Llama, and one of Python goes on in the trainer.

Run with `python tests/python/main.py trainer_checkpoint_test`; DOVETAIL names the trainer's program.
"""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

import torch

import dovetail
import ranks

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("DOVETAIL", str(ROOT / "build/bin/dovetail"))
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=32)
STEPS = 4


def trainer(folder, *more):
    """Runs the trainer on two ranks; what it printed."""
    text = folder / "text.txt"
    text.write_text("".join(f"line {i} of a text that is learned\n" for i in range(200)))
    config = folder / "tiny.toml"
    config.write_text(f'[run]\nname = "tiny"\nfolder = "{folder}/run"\n[model]\n'
                      + "".join(f"{k} = {v}\n" for k, v in SIZES.items())
                      + f'[data]\nsources = ["{text}"]\nsequence = 16\nvalidation_fraction = 0.1\n'
                      f'[train]\nsteps = {STEPS}\nbatch = 4\nvalidate_every = 0\n[optimizer]\nname = "adamw"\n'
                      'lr = 1e-2\nschedule = "constant"\nwarmup_steps = 0\n[sample]\ntokens = 4\n')
    done = subprocess.run([PROGRAM, "train", str(config), "--nproc", "2", *more], capture_output=True, text=True,
                          timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=False, **SIZES))
    for layer in model.model.layers:
        dovetail.fully_shard(layer)
    return dovetail.fully_shard(model)


def check_both_ways(world):
    folder = pathlib.Path(os.environ["TRAINER_FOLDER"])
    checkpoints = folder / "run/checkpoints"
    model = llama()
    optim = dovetail.optim.AdamW(model.parameters(), lr=1e-2)
    loaded = dovetail.checkpoint.load_checkpoint(model, optim, checkpoints)
    assert loaded.step == STEPS and loaded.extra == {}
    tokens = torch.frombuffer(bytearray(b"line 7 of a text"), dtype=torch.uint8).long()[None]
    loss = model(tokens, labels=tokens).loss
    assert loss < 5.0, loss  # 5.5 before training
    loss.backward()
    optim.step()
    assert all(optim.state[p]["step"] == STEPS + 1 for p in model.parameters())
    dovetail.checkpoint.save_checkpoint(model, optim, folder / "run/checkpoints")


class TrainerCheckpoints(unittest.TestCase):
    def test_both_ways(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            trainer(folder)
            os.environ["TRAINER_FOLDER"] = name
            for check, error in ranks.run([check_both_ways], 2).items():
                self.assertFalse(error, f"{check}: {error}")
            newest = sorted((folder / "run/checkpoints").glob("step-*"))[-1].name
            self.assertEqual(int(newest[5:]), STEPS + 1)
            said = trainer(folder, "--resume", "--set", f"train.steps={STEPS + 3}")
            self.assertIn("has no position in the data", said)
            steps = [json.loads(line)["step"] for line in (folder / "run/metrics.jsonl").read_text().splitlines()
                     if "grad_norm" in line]
            self.assertEqual(steps, list(range(1, STEPS + 1)) + [STEPS + 2, STEPS + 3])


if __name__ == "__main__":
    unittest.main()

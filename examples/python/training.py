"""What the examples share: options, ranks, text, the loop and what it prints, checkpoints.

Nothing here depends on Dovetail: with torch's own fully_shard it would be the same.
"""

import argparse
import math
import os
import pathlib
import sysconfig
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
VALIDATION_BATCHES = 4


def options(description: str, **defaults) -> argparse.Namespace:
    """The command line: --steps, --batch, --format, --save, and --NAME for each other default."""
    parser = argparse.ArgumentParser(description=description)
    helps = {"steps": "optimizer steps", "batch": "rows a rank takes per step", "sequence": "bytes of a row"}
    for name, value in ({"steps": 200, "batch": 8} | defaults).items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{helps[name]} (default {value})")
    parser.add_argument("--format", choices=["fp32", "bf16"], default="fp32",
                        help="what forward and backward compute in; main weights are fp32 (default fp32)")
    parser.add_argument("--save", type=pathlib.Path, metavar="FOLDER", help="where to leave a checkpoint")
    return parser.parse_args()


def start() -> None:
    """Joins the ranks of torchrun; alone, is the only one. The same random numbers, so weights, everywhere."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def library_files() -> list[pathlib.Path]:
    """The source files of Python's standard library, without installed packages and tests."""
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    return [file for file in sorted(folder.rglob("*.py"))
            if not NOT_LIBRARY.intersection(file.relative_to(folder).parts)]


class Text:
    """Bytes of the standard library's source. Every 20th file is for validation."""

    def __init__(self, sequence: int):
        self.sequence = sequence
        files = library_files()
        held_out = files[::20]
        self.validation = self._tokens(held_out)
        self.training = self._tokens([f for f in files if f not in held_out])

    @staticmethod
    def _tokens(files) -> torch.Tensor:
        return torch.frombuffer(bytearray(b"\0".join(f.read_bytes() for f in files)), dtype=torch.uint8)

    def batch(self, rows: int, seed: int, validation=False) -> torch.Tensor:
        """[rows, sequence] tokens that start at places which the seed chooses."""
        text = self.validation if validation else self.training
        at = torch.randint(len(text) - self.sequence, (rows, 1), generator=torch.Generator().manual_seed(seed))
        return text[at + torch.arange(self.sequence)].long()


def warmup_and_cosine(optimizer, steps: int, warmup: int = 10, last: float = 0.1):
    """Learning rates that rise for `warmup` steps, then fall to `last` of the highest."""
    def factor(step: int) -> float:
        fallen = min(1.0, max(0.0, (step - warmup) / max(1, steps - warmup)))
        return min(1.0, (step + 1) / warmup) * (last + (1 - last) * (1 + math.cos(math.pi * fallen)) / 2)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train(model, optimizer, loss_of, args, show) -> None:
    """Trains for args.steps, and measures the validation loss before and after.

    Args:
        loss_of: of (seed, validation) the mean loss over a batch that the seed chooses.
        show: of a loss, the words that are printed.
    """
    scheduler = warmup_and_cosine(optimizer, args.steps)
    rank, world = dist.get_rank(), dist.get_world_size()
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {world} rank(s)")
    say(f"validation before: {show(validation_loss(model, loss_of))}")
    began = time.perf_counter()
    for step in range(args.steps):
        loss = loss_of(step * world + rank, False)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % max(1, args.steps // 10) == 0:
            seconds = (time.perf_counter() - began) / (step + 1)
            say(f"step {step + 1:4}/{args.steps}  {show(mean_over_ranks(loss))}  "
                f"gradient norm {float(norm.full_tensor()):.2f}  rate {rate:.1e}  {1000 * seconds:.0f} ms/step")
    say(f"validation after:  {show(validation_loss(model, loss_of))}")


@torch.no_grad()
def validation_loss(model, loss_of) -> float:
    """Collective: every rank runs the same number of forwards, as each gathers parameters."""
    model.eval()
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = [loss_of(i * world + rank, True) for i in range(VALIDATION_BATCHES)]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


def mean_over_ranks(value: torch.Tensor) -> float:
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def bits_per_byte(loss: float) -> str:
    return f"{loss / math.log(2):.3f} bits per byte"


def save(folder: pathlib.Path | None, model, optimizer=None) -> None:
    """A checkpoint that any number of ranks loads, with torch.distributed.checkpoint.load."""
    if folder is None:
        return
    if optimizer is None:
        state = {"model": get_model_state_dict(model)}
    else:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=folder)
    say(f"checkpoint in {folder}")


def train_on_text(model, optimizer, args) -> None:
    """Trains a causal language model of transformers on bytes, then lets it write some."""
    text = Text(args.sequence)

    def loss_of(seed: int, validation: bool) -> torch.Tensor:
        tokens = text.batch(args.batch, seed, validation)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    train(model, optimizer, loss_of, args, bits_per_byte)
    say(f"sample:\n{sample(model)}")


@torch.no_grad()
def sample(model, prompt: bytes = b"def ", length: int = 60) -> str:
    """The prompt and what the model has to add. Collective: ranks draw the same bytes from the same prompt."""
    model.eval()
    torch.manual_seed(0)
    tokens = model.generate(torch.tensor([list(prompt)]), max_new_tokens=length, do_sample=True, temperature=0.7,
                            pad_token_id=0)
    return bytes(tokens[0].tolist()).decode("utf-8", "replace")

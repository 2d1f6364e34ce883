"""The quick start: train two small models on real data, kill them, resume, and compare every bit.

    files ─ convert ─ shards ─ pipeline ─ SavableLoader ─ trainer, saving every 10 steps ─ SIGKILL ─ resume ─ compare

    pip install 'savable_pipeline[quickstart]'; python tools/quickstart/quickstart.py   under three minutes on two cores

Copy what you need: a pipeline for images with captions, one for packed text, and a trainer for both. The models are in
models.py, the comparison with its table and picture in outcome.py: neither loads data.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from models import Captioner, Transformer
from outcome import Row, Trial, draw, make_table, ranks_row, read_log, trial_row
from PIL import Image
from rich.console import Console

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from task_encoders import CaptioningEncoder, LanguageModelingEncoder

SEED = 7
LANES = 12  # each has 150 of the 1,797 digits; with the default of 96 none would have a whole batch
CHECKPOINT_EVERY = 10
PACK = 256  # tokens
WORLD_SIZES = [1, 2, 4]  # divide the lanes

# 1. Data that is there after installation, as files; `savable convert FILES SHARDS` is the same as `sp.convert` below.


def write_digits(folder: Path) -> None:
    """The 1,797 scanned digits that come with scikit-learn, and captions: 0001.png beside 0001.txt."""
    from sklearn.datasets import load_digits

    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        gray = (image * (255 / 16)).astype("uint8")  # uint8 (8, 8)
        Image.fromarray(gray).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"a scanned {names[label]}")


def write_python(folder: Path) -> None:
    """The source files of Python's standard library, without its tests and what was installed beside it."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not left_out.intersection(name.parts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())


# 2. What a sample becomes, and the pipeline of one lane. Encoders are built once, outside.

DIGITS = CaptioningEncoder(image_size=16, crop_scale=(0.7, 1.0), flip=0.0)  # a mirrored 2 would be no 2
PYTHON = LanguageModelingEncoder(max_length=PACK, part="py")


def digits_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Images, randomly cropped, with their captions; 32 a batch."""
    samples: sp.SampleStage = sp.TarShardReader(str(shards), lane)
    samples = sp.ShuffleBuffer(samples, size=64)
    items = sp.Encode(samples, DIGITS)
    return sp.Batcher(items, size=32)


def python_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Source files in pieces of at most 256 bytes, end to end in packs of 256; 4 packs a batch."""
    samples: sp.SampleStage = sp.TarShardReader(str(shards), lane)
    samples = sp.ShuffleBuffer(samples, size=32)
    pieces = sp.Encode(samples, PYTHON)
    packs = sp.OnlinePacker(pieces, max_length=PACK)
    return sp.Batcher(packs, size=4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Data, pipeline and model that belong together."""

    name: str
    title: str
    write_files: Callable[[Path], None]
    pipeline: Callable[[Path, sp.Lane], sp.Stage]
    model: Callable[[], torch.nn.Module]  # from a batch to its loss

    def loader(self, folder: Path, num_workers: int) -> sp.SavableLoader:
        """The batches of this rank; of the only one if torch.distributed knows of none."""
        pipeline = partial(self.pipeline, folder / "shards")
        return sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=num_workers)


CAPTIONER = partial(Captioner, image_size=16, longest_caption=24)
TRANSFORMER = partial(Transformer, max_length=PACK)
RECIPES = {
    "digits": Recipe("digits", "CNN, scanned digits", write_digits, digits_pipeline, CAPTIONER),
    "python": Recipe("python", "transformer, Python's library", write_python, python_pipeline, TRANSFORMER),
}

# 3. The trainer: a process of its own, which may end at any moment.


def train(recipe: Recipe, folder: Path, run: str, steps: int, num_workers: int, resume: str | None = None) -> None:
    """Train a recipe's model, from the start or from the checkpoint of another run, and log every step."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums in the same order, on any machine
    torch.use_deterministic_algorithms(True)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first, began = 0, time.perf_counter()
    with recipe.loader(folder, num_workers) as loader, (folder / f"{run}.jsonl").open("w") as log:
        if resume:
            first = restore(folder / f"{resume}.pt", model, optimizer, loader)
        for step, batch in zip(range(first, steps), loader, strict=False):
            seconds = time.perf_counter() - began
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            entry = {"step": step, "loss": loss.item().hex(), "batch": digest(batch), "seconds": seconds}
            print(json.dumps(entry), file=log, flush=True)
            if (step + 1) % CHECKPOINT_EVERY == 0:
                save(folder / f"{run}.pt", step + 1, model, optimizer, loader)


def save(
    path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: sp.SavableLoader
) -> None:
    """Write all that the next step depends on; aside first, so that a kill leaves the last checkpoint whole."""
    checkpoint = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),  # dropout draws from it
        "data": loader.state_dict(),
    }
    aside = path.with_suffix(".tmp")
    torch.save(checkpoint, aside)
    aside.replace(path)


def restore(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: sp.SavableLoader) -> int:
    """Stand where the checkpoint was taken; gives the step that comes next."""
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["torch_rng"])
    loader.load_state_dict(checkpoint["data"])
    return int(checkpoint["step"])


# 4. The experiment: this process starts trainers, kills one, and compares what they logged.

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console(highlight=False)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="For data, logs, checkpoints, the picture.")] = Path("quickstart_run"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RECIPES)}; both by default.")] = None,
    ranks: Annotated[list[int], typer.Option(help="World sizes to compare, repeatable.")] = WORLD_SIZES,
    steps: Annotated[int, typer.Option(min=2 * CHECKPOINT_EVERY, help="Training steps of a run.")] = 120,
) -> None:
    """Train, kill, resume and compare; exits with 1 if a single bit differs."""
    if context.invoked_subcommand is not None:
        return
    if only is not None and only not in RECIPES:
        raise typer.BadParameter(f"--only {only}: expected one of {', '.join(RECIPES)}")
    began = time.perf_counter()
    names = [only] if only else list(RECIPES)
    for name in names:
        prepare(RECIPES[name], out / name)
    trials = [killed_and_resumed(RECIPES[name], out / name, steps) for name in names]
    slots = min(steps, 2 * LANES)
    rows = [trial_row(trial) for trial in trials]
    rows += [by_ranks(out, names, world_size, slots) for world_size in ranks]
    draw(trials, out / "loss.png")
    console.print(make_table(rows))
    console.print(f"picture: {out / 'loss.png'}; {time.perf_counter() - began:.0f} s in all")
    if not all(row.exact for row in rows):
        raise typer.Exit(1)


def prepare(recipe: Recipe, folder: Path) -> None:
    """Write the files of a recipe and convert them; nothing is converted that an earlier run has."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    recipe.write_files(folder / "files")
    report = sp.convert(folder / "files", folder / "shards", shard_samples=256)
    reasons = ", ".join(sorted({reject.reason for reject in report.rejected}))
    left_out = f"; {len(report.rejected)} left out: {reasons}" if reasons else ""
    console.print(f"{recipe.name}: {report.samples:,} samples in {report.shards} shards{left_out}")


def killed_and_resumed(recipe: Recipe, folder: Path, steps: int) -> Trial:
    """Train without an interruption; then with one, and with other numbers of workers."""
    start = partial(start_training, recipe, folder)
    console.print(f"{recipe.name}: {steps} steps, uninterrupted, no workers")
    finish(start("uninterrupted", steps, 0))
    console.print(f"{recipe.name}: again with 2 workers, until SIGKILL")
    middle = steps // 2 // CHECKPOINT_EVERY * CHECKPOINT_EVERY
    kill(start("killed", steps, 2), folder / "killed.jsonl", middle + random.randrange(2, 8))
    console.print(f"{recipe.name}: on from the last checkpoint, 1 worker")
    finish(start("resumed", steps, 1, "killed"))
    logs = (read_log(folder / f"{run}.jsonl") for run in ("uninterrupted", "killed", "resumed"))
    return Trial(recipe.name, recipe.title, "1 worker", *logs)


def start_training(recipe: Recipe, folder: Path, run: str, *settings: Any) -> BaseProcess:
    """A trainer in a process of its own, its log not there yet."""
    (folder / f"{run}.jsonl").unlink(missing_ok=True)
    processes = multiprocessing.get_context("forkserver")  # new ones, without the seconds that imports take
    processes.set_forkserver_preload(["torch._dynamo", "models", "task_encoders.captioning"])
    process = processes.Process(target=train, args=(recipe, folder, run, *settings))
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    """Wait for a process that should end well."""
    process.join()
    if process.exitcode:
        raise SystemExit(f"the trainer failed with exit code {process.exitcode}")


def kill(process: BaseProcess, log: Path, step: int) -> None:
    """Kill a trainer, which hears nothing of it, once it has logged this step."""
    while process.is_alive() and not (log.exists() and step in read_log(log)):
        time.sleep(0.005)
    if process.pid is None or not process.is_alive():
        raise SystemExit(f"the trainer ended with exit code {process.exitcode} before it could be killed")
    os.kill(process.pid, signal.SIGKILL)
    process.join()


# 5. The same batches for any number of ranks.


@app.command(hidden=True)
def stream(out: Path, slots: int, names: list[str]) -> None:
    """One of several ranks, under torchrun: log which batch each of its slots holds."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name in names:
        log_path = out / name / f"rank{rank}_of_{ranks}.jsonl"
        with RECIPES[name].loader(out / name, num_workers=0) as loader, log_path.open("w") as log:
            for slot, batch in zip(range(rank, slots, ranks), loader, strict=False):
                print(json.dumps({"step": slot, "batch": digest(batch)}), file=log, flush=True)
    dist.destroy_process_group()


def by_ranks(out: Path, names: list[str], world_size: int, slots: int) -> Row:
    """The same streams dealt over the ranks of a torchrun, against what the trainer, a single rank, was given."""
    run = f"{world_size} rank{'s' * (world_size > 1)}"
    console.print(f"{run} under torchrun: the first {slots} batches of {' and '.join(names)}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # or torchrun sets it and warns
    subprocess.run([*launcher, __file__, "stream", str(out), str(slots), *names], env=environment, check=True)
    comparisons = {}
    for name in names:
        logs = [read_log(out / name / f"rank{rank}_of_{world_size}.jsonl") for rank in range(world_size)]
        comparisons[name] = (read_log(out / name / "uninterrupted.jsonl"), logs)
    return ranks_row(run, slots, comparisons)


if __name__ == "__main__":
    app()

"""Quick start: train two small models on real data, kill and resume them, and compare every bit.

    files ─ convert ─ shards ─ pipeline ─ SavableLoader ─ trainer, saving every 10 steps ─ SIGKILL ─ resume ─ compare

    pip install 'savable_pipeline[quickstart]'; python tools/quickstart/quickstart.py

Copy what you need: a pipeline for images with captions, one for packed text, and a trainer for both. The models are in
models.py, the processes that train in runs.py, and the comparison and its picture in outcome.py. None of these files
loads data.
"""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.distributed as dist
import typer
from bars import Bars
from models import Captioner, Transformer
from outcome import Trial, draw, first_difference, verdict
from PIL import Image
from rich.console import Console
from runs import Log, Run

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from task_encoders import CaptioningEncoder, LanguageModelingEncoder

SEED = 7
LANES = 12  # each has 150 of the 1,797 digits; with the default of 96, no lane would have enough for a batch
CHECKPOINT_EVERY = 10
PACK = 256  # tokens
WORLD_SIZES = [2, 4]  # they must divide the lanes

# 1. Write data that is available after installation as files. `savable convert FILES SHARDS` equals `sp.convert` below.


def write_digits(folder: Path) -> None:
    """Write the 1,797 scanned digits of scikit-learn as 0001.png, …, with captions 0001.txt, …"""
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    # importing scikit-learn would take seconds
    table = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    for number, (*pixels, label) in enumerate(np.loadtxt(str(table), dtype=int, delimiter=",")):
        gray = (np.array(pixels) * (255 / 16)).astype("uint8").reshape(8, 8)
        Image.fromarray(gray).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"a scanned {names[label]}")


def write_python(folder: Path) -> None:
    """Write the source files of Python's standard library, without its tests and other packages."""
    library = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not excluded.intersection(name.parts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())


# 2. Define the encoders and pipelines.

DIGITS = CaptioningEncoder(image_size=16, crop_scale=(0.7, 1.0), flip=0.0)  # a mirrored 2 would be no 2
PYTHON = LanguageModelingEncoder(max_length=PACK, part="py")


def digits_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 32 randomly cropped images with captions."""
    return sp.read(shards).shuffle(64).encode(DIGITS).batch(32)


def python_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 4 packs of 256 tokens. A token is a byte, and longer files are split."""
    return sp.read(shards).shuffle(32).encode(PYTHON).pack(max_length=PACK).batch(4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Data, pipeline and model of one example."""

    name: str
    title: str
    write_files: Callable[[Path], None]
    pipeline: Callable[[Path], sp.Pipeline]
    model: Callable[[], torch.nn.Module]  # maps a batch to its loss

    def loader(self, folder: Path, num_workers: int) -> sp.SavableLoader:
        """Open the loader of this rank, or of the only one without torch.distributed."""
        pipeline = self.pipeline(folder / "shards")
        return sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=num_workers)


CAPTIONER = partial(Captioner, image_size=16, longest_caption=24)
TRANSFORMER = partial(Transformer, max_length=PACK, width=64, heads=2)
RECIPES = {
    "digits": Recipe("digits", "CNN, scanned digits", write_digits, digits_pipeline, CAPTIONER),
    "python": Recipe("python", "transformer, Python's library", write_python, python_pipeline, TRANSFORMER),
}

# 3. Train in a process that may die at any moment.


def train(
    log_path: Path, recipe: Recipe, folder: Path, steps: int, num_workers: int, resume: Path | None = None
) -> None:
    """Train a recipe's model from the start, or from the checkpoint `resume`, and log every step."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums then have the same order on any machine
    torch.use_deterministic_algorithms(True)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = 0
    with recipe.loader(folder, num_workers) as loader, log_path.open("w") as log:
        if resume:
            first = restore(resume, model, optimizer, loader)
        for step, batch in zip(range(first, steps), loader, strict=False):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            entry = {"step": step, "batch": digest(batch), "loss": loss.item().hex()}
            print(json.dumps(entry), file=log, flush=True)
            if (step + 1) % CHECKPOINT_EVERY == 0:
                save(log_path.with_suffix(".pt"), step + 1, model, optimizer, loader)


def save(
    path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: sp.SavableLoader
) -> None:
    """Save everything that the next step depends on. The write is atomic, so a kill keeps the last checkpoint."""
    checkpoint = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "torch_rng": torch.get_rng_state(),  # dropout draws from it
        "data": loader.state_dict(),
    }
    temporary = path.with_suffix(".tmp")
    torch.save(checkpoint, temporary)
    temporary.replace(path)


def restore(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: sp.SavableLoader) -> int:
    """Load a checkpoint, and return the number of the next step."""
    checkpoint = torch.load(path, weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["torch_rng"])
    loader.load_state_dict(checkpoint["data"])
    return int(checkpoint["step"])


# 4. Start trainers, kill one, and compare their logs.

console = Console(highlight=False, soft_wrap=True)


def main(
    out: Annotated[Path, typer.Option(help="The folder of data, logs and the picture.")] = Path("quickstart_run"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RECIPES)}; both by default.")] = None,
    ranks: Annotated[list[int], typer.Option(help="World sizes to compare, repeatable.")] = WORLD_SIZES,
    steps: Annotated[int, typer.Option(min=2 * CHECKPOINT_EVERY, help="Training steps of a run.")] = 100,
) -> None:
    """Train, kill, resume and compare. Exits with 1 if any bit differs."""
    if only is not None and only not in RECIPES:
        raise typer.BadParameter(f"--only {only}: expected one of {', '.join(RECIPES)}")
    torch.set_num_threads(1)  # a forked process would not have the other threads
    recipes = [RECIPES[only]] if only else list(RECIPES.values())
    for recipe in recipes:
        prepare(recipe, out / recipe.name)
        show_batch(recipe, out / recipe.name)
    rank_differences = {f"{recipe.name}, ranks": compare_ranks(recipe, out / recipe.name, ranks) for recipe in recipes}
    trials = [kill_and_resume(recipe, out / recipe.name, steps) for recipe in recipes]
    draw(trials, out / "loss.png")
    conclude(rank_differences | {trial.name: trial.difference for trial in trials}, out / "loss.png")


def conclude(differences: dict[str, str | None], picture: Path) -> None:
    """Print the result in a sentence. Exits with 1 if a run differs."""
    failed = "; ".join(f"{name}: {difference}" for name, difference in differences.items() if difference)
    same = (
        "Every batch and every loss of the runs that were killed and resumed equals, bit for bit, that of the runs "
        "that never stopped."
    )
    console.print(f"\n{verdict(failed or None, same)}\npicture: {picture}")
    if failed:
        raise typer.Exit(1)


def prepare(recipe: Recipe, folder: Path) -> None:
    """Write and convert the files of a recipe, unless an earlier run has converted them."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    recipe.write_files(folder / "files")
    report = sp.convert(folder / "files", folder / "shards", shard_samples=256)
    reasons = ", ".join(sorted({reject.reason for reject in report.rejected}))
    excluded = f"; {len(report.rejected)} rejected: {reasons}" if reasons else ""
    console.print(f"{recipe.name}: {report.samples:,} samples in {report.shards} shards{excluded}")


def show_batch(recipe: Recipe, folder: Path) -> None:
    """Build a batch without a loader, and print its shapes."""
    [batch] = recipe.pipeline(folder / "shards").take(1)
    shapes = ", ".join(f"{field} {tuple(batch[field].shape)}" for field in ("image", "tokens") if field in batch)
    console.print(f"{recipe.name}: a batch has {shapes}")


def kill_and_resume(recipe: Recipe, folder: Path, steps: int) -> Trial:
    """Train uninterrupted and, at the same time, until SIGKILL. Then resume with another number of workers."""
    import torch._dynamo  # noqa: F401  torch's optimizers import it at their first step; here it is once for all runs

    def start(title: str, run: str, *settings: object) -> Run:
        started = processes.enter_context(Run(folder / f"{run}.jsonl", train, recipe, folder, steps, *settings))
        bars.add(f"{recipe.name}: {title}", started)
        return started

    middle = steps // 2 // CHECKPOINT_EVERY * CHECKPOINT_EVERY + random.randrange(2, 8)
    with ExitStack() as processes, Bars(console, steps) as bars:
        uninterrupted = start("never stopped, no workers", "uninterrupted", 0)
        killed = start("2 workers, until SIGKILL", "killed", 2)
        bars.follow(lambda: middle in killed.log or killed.has_ended())
        killed.kill()
        resumed = start("resumed with 1 worker", "resumed", 1, folder / "killed.pt")
        bars.follow(lambda: uninterrupted.has_ended() and resumed.has_ended())
    trial = Trial(recipe.name, recipe.title, steps, uninterrupted.log, killed.log, resumed.log)
    console.print(str(trial))
    return trial


# 5. Compare the batches on one and on several ranks.


def compare_ranks(recipe: Recipe, folder: Path, world_sizes: list[int]) -> str | None:
    """Compare the first batches on one rank and on several, and return the first difference, if any."""
    slots = 2 * LANES
    (one,) = run_ranks(recipe, folder, slots, 1)
    differences = {size: first_difference(one, run_ranks(recipe, folder, slots, size), slots) for size in world_sizes}
    failed = "; ".join(f"{size} ranks: {difference}" for size, difference in differences.items() if difference)
    sizes = " and ".join(map(str, world_sizes))
    same = f"the first {slots} batches are the same on {sizes} ranks as on one"
    console.print(f"{recipe.name}: {verdict(failed or None, same)}")
    return failed or None


def run_ranks(recipe: Recipe, folder: Path, slots: int, world_size: int) -> list[Log]:
    """Run one process per rank, and return their logs."""
    (folder / "rendezvous").unlink(missing_ok=True)
    with ExitStack() as processes:
        ranks = [
            processes.enter_context(
                Run(folder / f"rank{rank}_of_{world_size}.jsonl", stream, recipe, folder, slots, rank, world_size)
            )
            for rank in range(world_size)
        ]
        return [rank.finish() for rank in ranks]


def stream(log_path: Path, recipe: Recipe, folder: Path, slots: int, rank: int, world_size: int) -> None:
    """Run one of several ranks, and log the hash of the batch of each of its slots."""
    rendezvous = f"file://{folder.absolute()}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    with recipe.loader(folder, num_workers=0) as loader, log_path.open("w") as log:
        for slot, batch in zip(range(rank, slots, world_size), loader, strict=False):
            print(json.dumps({"step": slot, "batch": digest(batch)}), file=log, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

"""The quick start: train two small models on real data, kill them, resume, and compare every bit.

    files ─ convert ─ shards ─ pipeline ─ SavableLoader ─ trainer, saving every 10 steps ─ SIGKILL ─ resume ─ compare

    pip install 'savable_pipeline[quickstart]'; python tools/quickstart/quickstart.py

Copy what you need: a pipeline for images with captions, one for packed text, and a trainer for both. The models are in
models.py, the processes that train in runs.py, the comparison and its picture in outcome.py: none of these loads data.
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
LANES = 12  # each has 150 of the 1,797 digits; with the default of 96 none would have a whole batch
CHECKPOINT_EVERY = 10
PACK = 256  # tokens
WORLD_SIZES = [2, 4]  # divide the lanes

# 1. Data that is there after installation, as files; `savable convert FILES SHARDS` is the same as `sp.convert` below.


def write_digits(folder: Path) -> None:
    """The 1,797 scanned digits that come with scikit-learn, and captions: 0001.png beside 0001.txt."""
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    table = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # its import takes seconds
    for number, (*pixels, label) in enumerate(np.loadtxt(str(table), dtype=int, delimiter=",")):
        gray = (np.array(pixels) * (255 / 16)).astype("uint8").reshape(8, 8)
        Image.fromarray(gray).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.txt").write_text(f"a scanned {names[label]}")


def write_python(folder: Path) -> None:
    """The source files of Python's standard library, without its tests and what was installed beside it."""
    library = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        if not excluded.intersection(name.parts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(path.read_bytes())


# 2. What a sample becomes, and the pipeline.

DIGITS = CaptioningEncoder(image_size=16, crop_scale=(0.7, 1.0), flip=0.0)  # a mirrored 2 would be no 2
PYTHON = LanguageModelingEncoder(max_length=PACK, part="py")


def digits_pipeline(shards: Path) -> sp.Pipeline:
    """Images, randomly cropped, with their captions; 32 a batch."""
    return sp.read(shards).shuffle(64).encode(DIGITS).batch(32)


def python_pipeline(shards: Path) -> sp.Pipeline:
    """Source files in pieces of at most 256 bytes, end to end in packs of 256; 4 packs a batch."""
    return sp.read(shards).shuffle(32).encode(PYTHON).pack(max_length=PACK).batch(4)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Data, pipeline and model that belong together."""

    name: str
    title: str
    write_files: Callable[[Path], None]
    pipeline: Callable[[Path], sp.Pipeline]
    model: Callable[[], torch.nn.Module]  # from a batch to its loss

    def loader(self, folder: Path, num_workers: int) -> sp.SavableLoader:
        """The batches of this rank; of the only one if torch.distributed knows of none."""
        pipeline = self.pipeline(folder / "shards")
        return sp.SavableLoader(pipeline, seed=SEED, lanes=LANES, num_workers=num_workers)


CAPTIONER = partial(Captioner, image_size=16, longest_caption=24)
TRANSFORMER = partial(Transformer, max_length=PACK, width=64, heads=2)
RECIPES = {
    "digits": Recipe("digits", "CNN, scanned digits", write_digits, digits_pipeline, CAPTIONER),
    "python": Recipe("python", "transformer, Python's library", write_python, python_pipeline, TRANSFORMER),
}

# 3. The trainer: a process of its own, which may end at any moment.


def train(
    log_path: Path, recipe: Recipe, folder: Path, steps: int, num_workers: int, resume: Path | None = None
) -> None:
    """Train a recipe's model, from the start or from the checkpoint of another run, and log every step."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # sums in the same order, on any machine
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

console = Console(highlight=False, soft_wrap=True)


def main(
    out: Annotated[Path, typer.Option(help="For data, logs, checkpoints, the picture.")] = Path("quickstart_run"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(RECIPES)}; both by default.")] = None,
    ranks: Annotated[list[int], typer.Option(help="World sizes to compare, repeatable.")] = WORLD_SIZES,
    steps: Annotated[int, typer.Option(min=2 * CHECKPOINT_EVERY, help="Training steps of a run.")] = 100,
) -> None:
    """Train, kill, resume and compare; exits with 1 if a single bit differs."""
    if only is not None and only not in RECIPES:
        raise typer.BadParameter(f"--only {only}: expected one of {', '.join(RECIPES)}")
    torch.set_num_threads(1)  # what is forked must not miss the other threads
    recipes = [RECIPES[only]] if only else list(RECIPES.values())
    for recipe in recipes:
        prepare(recipe, out / recipe.name)
        show_batch(recipe, out / recipe.name)
    dealt = {f"{recipe.name}, ranks": dealt_to_ranks(recipe, out / recipe.name, ranks) for recipe in recipes}
    trials = [killed_and_resumed(recipe, out / recipe.name, steps) for recipe in recipes]
    draw(trials, out / "loss.png")
    conclude(dealt | {trial.name: trial.difference for trial in trials}, out / "loss.png")


def conclude(differences: dict[str, str | None], picture: Path) -> None:
    """Say in a sentence what was shown, or that it was not; then exit with 1."""
    failed = "; ".join(f"{name}: {difference}" for name, difference in differences.items() if difference)
    same = (
        "Every batch and every loss of the runs that were killed and resumed equals, bit for bit, that of the runs "
        "that never stopped."
    )
    console.print(f"\n{verdict(failed or None, same)}\npicture: {picture}")
    if failed:
        raise typer.Exit(1)


def prepare(recipe: Recipe, folder: Path) -> None:
    """Write the files of a recipe and convert them; nothing is converted that an earlier run has."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    recipe.write_files(folder / "files")
    report = sp.convert(folder / "files", folder / "shards", shard_samples=256)
    reasons = ", ".join(sorted({reject.reason for reject in report.rejected}))
    excluded = f"; {len(report.rejected)} left out: {reasons}" if reasons else ""
    console.print(f"{recipe.name}: {report.samples:,} samples in {report.shards} shards{excluded}")


def show_batch(recipe: Recipe, folder: Path) -> None:
    """Make a batch, for which no loader is needed."""
    [batch] = recipe.pipeline(folder / "shards").take(1)
    shapes = ", ".join(f"{field} {tuple(batch[field].shape)}" for field in ("image", "tokens") if field in batch)
    console.print(f"{recipe.name}: a batch has {shapes}")


def killed_and_resumed(recipe: Recipe, folder: Path, steps: int) -> Trial:
    """Train without an interruption; beside that until SIGKILL, and on with another number of workers."""
    import torch._dynamo  # noqa: F401  torch's optimizers do at their first step; once here, not in each run

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


# 5. The same batches for any number of ranks.


def dealt_to_ranks(recipe: Recipe, folder: Path, world_sizes: list[int]) -> str | None:
    """Deal the first batches to one rank, and to several: the first difference, if there is one."""
    slots = 2 * LANES
    (one,) = run_ranks(recipe, folder, slots, 1)
    found = {size: first_difference(one, run_ranks(recipe, folder, slots, size), slots) for size in world_sizes}
    failed = "; ".join(f"{size} ranks: {difference}" for size, difference in found.items() if difference)
    sizes = " and ".join(map(str, world_sizes))
    same = f"the first {slots} batches are the same, dealt to {sizes} ranks as to one"
    console.print(f"{recipe.name}: {verdict(failed or None, same)}")
    return failed or None


def run_ranks(recipe: Recipe, folder: Path, slots: int, world_size: int) -> list[Log]:
    """Run `world_size` processes, and return what each received."""
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
    """One of several ranks: log which batch each of its slots holds."""
    meeting = f"file://{folder.absolute()}/rendezvous"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    with recipe.loader(folder, num_workers=0) as loader, log_path.open("w") as log:
        for slot, batch in zip(range(rank, slots, world_size), loader, strict=False):
            print(json.dumps({"step": slot, "batch": digest(batch)}), file=log, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)

"""The first minute: 20 pictures become shards, a page and batches; who takes these is killed, goes on and is compared.

    pip install -e . && python tools/quickstart/first_minute.py

    files ─ savable convert ─ shards ─ savable preview ─ page
                              shards ─ pipeline ─ SavableLoader ─ SIGKILL ─ resume ─ compare

Nothing is trained here; quickstart.py does that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Annotated

import typer
from outcome import first_difference
from PIL import Image, ImageDraw
from runs import Log, Run

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest

AT_LEAST = 6  # batches before the kill, and as many after it
SAVE_EVERY = 4


def draw_pictures(folder: Path) -> None:
    """A disk in some place and colour, 00.png beside 00.txt, twenty times."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        colour = ("red", "green", "blue", "orange", "purple")[number % 5]
        x, y = 8 * (number % 4), 6 * (number // 4)
        picture = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(picture).ellipse((x, y, x + 30, y + 30), fill=colour)
        picture.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a {colour} disk, {x} from the left and {y} from the top")


def savable(*words: str) -> None:
    """Run the command `savable`, as you would."""
    print("\n$ savable", *words, flush=True)
    subprocess.run([Path(sysconfig.get_path("scripts")) / "savable", *words], check=True)


def pipeline(shards: Path, encoder: sp.TaskEncoder) -> sp.Pipeline:
    """Pictures with captions, shuffled and randomly cropped, 4 a batch."""
    return sp.read(str(shards)).shuffle(4).encode(encoder).batch(4)


def take_batches(
    log_path: Path, shards: Path, encoder: sp.TaskEncoder, num_workers: int, end: int, checkpoint: Path | None = None
) -> None:
    """Do what a trainer does, without a model: take batches, log each, save now and then; go on from a checkpoint."""
    import torch

    chain, saved = pipeline(shards, encoder), log_path.with_suffix(".pt")
    with sp.SavableLoader(chain, seed=7, lanes=4, num_workers=num_workers) as loader, log_path.open("w") as log:
        first = 0
        if checkpoint:
            found = torch.load(checkpoint)
            loader.load_state_dict(found["data"])
            first = found["step"]
        for step, batch in zip(range(first, end), loader, strict=False):
            print(json.dumps({"step": step, "batch": digest(batch)}), file=log, flush=True)
            if (step + 1) % SAVE_EVERY == 0:
                torch.save({"step": step + 1, "data": loader.state_dict()}, saved.with_suffix(".tmp"))
                saved.with_suffix(".tmp").replace(saved)  # a kill leaves the last one whole
            time.sleep(0.01)  # a model would learn here


def main(out: Annotated[Path, typer.Option(help="For what is made.")] = Path("first_minute_run")) -> None:
    """Convert, preview, take batches, kill, resume and compare; exits with 1 if a single byte differs."""
    draw_pictures(out / "files")
    print(f"20 pictures with captions: {out / 'files'}")
    savable("convert", str(out / "files"), str(out / "shards"))
    savable("preview", str(out / "shards"), "-o", str(out / "preview.html"))

    from task_encoders import CaptioningEncoder  # imports torch: once, since what follows is forked

    encoder = CaptioningEncoder(image_size=32)
    [batch] = pipeline(out / "shards", encoder).take(1)
    print("\na batch:", ", ".join(f"{name} {tuple(batch[name].shape)}" for name in ("image", "tokens")))

    def start(run: str, *settings: object) -> Run:
        return Run(out / f"{run}.jsonl", take_batches, out / "shards", encoder, *settings)

    print("taking batches with 2 workers, until SIGKILL", flush=True)
    with start("killed", 2, 10_000) as run:
        while len(run.read()) < AT_LEAST and not run.has_ended():
            time.sleep(0.01)
        killed = run.kill()
    print("on from what it saved, with 1 worker; and from the start without a stop, without workers", flush=True)
    end = max(killed) + 1 + AT_LEAST
    with start("resumed", 1, end, out / "killed.pt") as run:
        resumed = run.finish()
    with start("never_stopped", 0, end) as run:
        compare(run.finish(), killed, resumed)


def compare(expected: Log, killed: Log, resumed: Log) -> None:
    """Show how the hash of every batch begins, and what differs."""
    print("\nbatch  never stopped     killed            resumed")
    for step in expected:
        hashes = (log[step]["batch"][:16] if step in log else " " * 16 for log in (expected, killed, resumed))
        print(f"{step:5}", *hashes, sep="  ")
    difference = first_difference(expected, [killed, resumed], max(resumed) + 1)
    if difference:
        sys.exit(f"FAILED: {difference}")
    print(f"the same: {len(expected)} batches, every byte")


if __name__ == "__main__":
    typer.run(main)

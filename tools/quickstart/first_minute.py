"""First minute: convert 20 images, preview them, read batches, kill the reader, resume it, and compare all batches.

    pip install -e . && python tools/quickstart/first_minute.py

    files ─ savable convert ─ shards ─ savable preview ─ page
                              shards ─ pipeline ─ SavableLoader ─ SIGKILL ─ resume ─ compare

This trains no model; quickstart.py does.
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

MIN_BATCHES = 6  # least number of batches before the kill, and again after it
SAVE_EVERY = 4  # batches


def draw_pictures(folder: Path) -> None:
    """Write twenty images of a disk as 00.png, 01.png, …, with captions 00.txt, 01.txt, …"""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(20):
        colour = ("red", "green", "blue", "orange", "purple")[number % 5]
        x, y = 8 * (number % 4), 6 * (number // 4)
        picture = Image.new("RGB", (64, 64), "white")
        ImageDraw.Draw(picture).ellipse((x, y, x + 30, y + 30), fill=colour)
        picture.save(folder / f"{number:02}.png")
        (folder / f"{number:02}.txt").write_text(f"a {colour} disk, {x} from the left and {y} from the top")


def savable(*arguments: str) -> None:
    """Print and run a command `savable …`."""
    print("\n$ savable", *arguments, flush=True)
    subprocess.run([Path(sysconfig.get_path("scripts")) / "savable", *arguments], check=True)


def pipeline(shards: Path, encoder: sp.TaskEncoder) -> sp.Pipeline:
    """Build batches of 4 images with captions, shuffled and randomly cropped."""
    return sp.read(str(shards)).shuffle(4).encode(encoder).batch(4)


def take_batches(
    log_path: Path, shards: Path, encoder: sp.TaskEncoder, num_workers: int, end: int, checkpoint: Path | None = None
) -> None:
    """Act as a trainer without a model: read batches, log them, and save every few batches.

    Args:
        log_path: The log. The checkpoint is next to it.
        shards: The folder of the data.
        encoder: The encoder of samples.
        num_workers: The number of worker processes.
        end: The batch before which to stop.
        checkpoint: The checkpoint from which to resume.
    """
    import torch

    batches, checkpoint_path = pipeline(shards, encoder), log_path.with_suffix(".pt")
    with sp.SavableLoader(batches, seed=7, lanes=4, num_workers=num_workers) as loader, log_path.open("w") as log:
        first = 0
        if checkpoint:
            loaded = torch.load(checkpoint)
            loader.load_state_dict(loaded["data"])
            first = loaded["step"]
        for step, batch in zip(range(first, end), loader, strict=False):
            print(json.dumps({"step": step, "batch": digest(batch)}), file=log, flush=True)
            if (step + 1) % SAVE_EVERY == 0:
                torch.save({"step": step + 1, "data": loader.state_dict()}, checkpoint_path.with_suffix(".tmp"))
                # This is atomic, so that a kill cannot damage the last checkpoint.
                checkpoint_path.with_suffix(".tmp").replace(checkpoint_path)
            time.sleep(0.01)  # in place of a training step


def main(out: Annotated[Path, typer.Option(help="Where to write.")] = Path("first_minute_run")) -> None:
    """Convert, preview, read batches, kill, resume and compare. Exits with 1 if any byte differs."""
    draw_pictures(out / "files")
    print(f"20 pictures with captions: {out / 'files'}")
    savable("convert", str(out / "files"), str(out / "shards"))
    savable("preview", str(out / "shards"), "-o", str(out / "preview.html"))

    from task_encoders import CaptioningEncoder  # imports torch, once for all processes that are forked below

    encoder = CaptioningEncoder(image_size=32)
    [batch] = pipeline(out / "shards", encoder).take(1)
    print("\na batch:", ", ".join(f"{name} {tuple(batch[name].shape)}" for name in ("image", "tokens")))

    def start(run: str, *settings: object) -> Run:
        return Run(out / f"{run}.jsonl", take_batches, out / "shards", encoder, *settings)

    print("taking batches with 2 workers, until SIGKILL", flush=True)
    with start("killed", 2, 10_000) as run:
        while len(run.read()) < MIN_BATCHES and not run.has_ended():
            time.sleep(0.01)
        killed = run.kill()
    print("resuming from its checkpoint with 1 worker, and running uninterrupted without workers", flush=True)
    end = max(killed) + 1 + MIN_BATCHES
    with start("resumed", 1, end, out / "killed.pt") as run:
        resumed = run.finish()
    with start("never_stopped", 0, end) as run:
        compare(run.finish(), killed, resumed)


def compare(expected: Log, killed: Log, resumed: Log) -> None:
    """Print the start of every batch's hash, and exit with the first difference."""
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

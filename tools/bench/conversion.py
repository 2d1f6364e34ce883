"""Measures conversion beside other writers: processor time, memory and bytes on disk of the same pairs of files.

    python tools/bench/conversion.py [--pairs 6000] [--rounds 3] [--python mds=/path/to/python …]

A folder of JPEGs and captions is written by `savable convert`, a loop over webdataset's ShardWriter, LitData's
`optimize`, Mosaic's MDSWriter and HF datasets' `save_to_disk`: each in a process of its own, in turn, with one worker.
Those that are not installed take no part; `--python` names an interpreter that has one of them.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CAPTION = "a picture of nothing in particular, in colours that were drawn by chance; number {}"


def write_pairs(folder: Path, count: int) -> None:
    """`count` JPEGs of about 20 kB, each with a caption of one line."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    images = []
    for _ in range(50):
        file = io.BytesIO()
        small = draw.integers(0, 255, (48, 48, 3), np.uint8)
        Image.fromarray(small).resize((256, 256)).save(file, "JPEG", quality=95)
        images.append(file.getvalue())
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(images[number % len(images)])
        (folder / f"{number:06d}.txt").write_text(CAPTION.format(number))


# The writers. Each reads the folder with the same loop, but ours, which has its own.


def pairs(folder: Path) -> Iterator[tuple[str, bytes, str]]:
    """Key, bytes of the image and caption of each pair."""
    for path in sorted(folder.glob("*.jpg")):
        yield path.stem, path.read_bytes(), path.with_suffix(".txt").read_text()


def ours(source: Path, target: Path, *options: str) -> None:
    from savable_pipeline.tools.cli.main import app

    words = ["convert", "--workers", "1", *options, str(source), str(target)]
    app(words, prog_name="savable", standalone_mode=False)


def unchecked(source: Path, target: Path) -> None:
    """As the other writers, which take images as they are."""
    ours(source, target, "--no-check-images")


def tar_writer(source: Path, target: Path) -> None:
    import webdataset

    target.mkdir()
    with webdataset.ShardWriter(str(target / "%06d.tar"), maxsize=1e9, verbose=0) as writer:
        for key, image, caption in pairs(source):
            writer.write({"__key__": key, "jpg": image, "txt": caption})


def _litdata_sample(path: str) -> dict[str, object]:
    return {"jpg": Path(path).read_bytes(), "txt": Path(path).with_suffix(".txt").read_text()}


def litdata(source: Path, target: Path) -> None:
    from litdata import optimize

    files = [str(path) for path in sorted(source.glob("*.jpg"))]
    optimize(fn=_litdata_sample, inputs=files, output_dir=str(target), num_workers=1, chunk_bytes="64MB")


def mds(source: Path, target: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(target), columns={"key": "str", "jpg": "bytes", "txt": "str"}) as writer:
        for key, image, caption in pairs(source):
            writer.write({"key": key, "jpg": image, "txt": caption})


def hugging_face(source: Path, target: Path) -> None:
    import datasets

    def rows() -> Iterator[dict[str, object]]:
        for key, image, caption in pairs(source):
            yield {"key": key, "image": image, "txt": caption}

    made = datasets.Dataset.from_generator(rows, cache_dir=str(target.with_name(target.name + ".cache")))
    made.save_to_disk(str(target))


WRITERS: dict[str, tuple[str, Callable[[Path, Path], None]]] = {
    "ours": ("savable convert", ours),
    "unchecked": ("the same, --no-check-images", unchecked),
    "tar": ("webdataset's ShardWriter", tar_writer),
    "litdata": ("LitData's optimize", litdata),
    "mds": ("Mosaic's MDSWriter", mds),
    "hf": ("HF datasets' save_to_disk", hugging_face),
}


# The measure.


@dataclass
class Cost:
    """Of one run: seconds of processor time of all its processes, seconds by the clock, and the most memory of one."""

    processor_s: float
    wall_s: float
    memory: int  # bytes
    disk: int  # bytes


def run_once(name: str, python: str, source: Path, target: Path) -> Cost | str:
    """One conversion in a process of its own; the last line of its error where it failed."""
    command = [python, __file__, "--one", name, str(source), str(target)]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    took = time.perf_counter() - begun
    if process.returncode:
        return (errors.strip().splitlines() or ["no message"])[-1]
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Cost(used.ru_utime + used.ru_stime, took, used.ru_maxrss * 1024, size)


def compare(count: int, rounds: int, pythons: dict[str, str], room: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    source = room / "pairs"
    write_pairs(source, count)
    found: dict[str, list[Cost]] = {name: [] for name in WRITERS}
    for _ in range(rounds):
        for name in WRITERS:
            target = room / name
            cost = run_once(name, pythons.get(name, sys.executable), source, target)
            if isinstance(cost, Cost):
                found[name].append(cost)
            else:
                print(f"{WRITERS[name][0]} does not run: {cost}", file=sys.stderr)
            for path in (target, target.with_name(target.name + ".cache")):
                shutil.rmtree(path, ignore_errors=True)
    table = Table("writer", "processor s", "beside ours", "clock s", "memory MB", "on disk MB")
    table.title, table.title_justify = f"{count:,} pairs of files", "left"
    for name, costs in found.items():
        if costs and found["ours"]:
            ratios = [cost.processor_s / our.processor_s for cost, our in zip(costs, found["ours"], strict=False)]
            table.add_row(
                WRITERS[name][0],
                f"{statistics.median(cost.processor_s for cost in costs):.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{statistics.median(cost.wall_s for cost in costs):.2f}",
                f"{max(cost.memory for cost in costs) / 1e6:.0f}",
                f"{costs[0].disk / 1e6:.1f}",
            )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="an interpreter for a writer"
    )
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, source, target = given.one
        WRITERS[name][1](Path(source), Path(target))
        return
    with tempfile.TemporaryDirectory() as room:
        compare(given.pairs, given.rounds, dict(each.split("=", 1) for each in given.python), Path(room))


if __name__ == "__main__":
    main()

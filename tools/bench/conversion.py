"""Conversion and indexing beside other programs, each a command with one process that reads.

    python tools/bench/conversion.py convert [--pairs 6000] [--pythons mds=/path/to/python …]
    python tools/bench/conversion.py index [--samples 200000] [--energon /path/to/energon]

`convert`: a folder of JPEGs and captions is written by `savable convert`, a loop over webdataset's ShardWriter,
LitData's `optimize`, Mosaic's MDSWriter and HF datasets' `save_to_disk`. `--pythons` names interpreters that have one.

`index`: shards of 10,000 pairs of a picture of 2 kB and JSON are stripped of their indexes before each run of
`savable index` and `energon prepare`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import peers
from data import jpeg_of
from PIL import Image
from rounds import Bench, Cost, Way, command, console, main

import savable_pipeline as sp

SAVABLE = [sys.executable, "-c", "from savable_pipeline.tools.cli.main import app; app()"]
PICTURE = 2_000  # bytes
_ENERGON = ["--num-workers=1", "--non-interactive", "--force-overwrite", "--split-ratio=1,0,0"]
_ENERGON += ["--sample-type=CaptioningSample", '--field-map={"image": "jpg", "caption": "json[caption]"}']


def convert(bench: Bench) -> None:
    """Each writes the same pairs."""
    pythons, count = dict(each.split("=", 1) for each in bench.options.pythons), bench.options.pairs
    with tempfile.TemporaryDirectory(dir=bench.data) as room:
        source, target, sizes = Path(room) / "pairs", Path(room) / "target", dict[str, int]()
        write_pairs(source, count)
        paths = [str(source), str(target)]
        words = {
            "savable convert": [*SAVABLE, "convert", "--workers", "1", *paths],
            "the same, --no-check-images": [*SAVABLE, "convert", "--workers", "1", "--no-check-images", *paths],
        }
        for name, write in peers.WRITERS.items():
            python = pythons.get(name, sys.executable)
            words[(write.__doc__ or name).rstrip(".")] = [python, peers.__file__, "write", name, *paths]

        def way(name: str) -> Way:
            def run() -> Cost:
                for path in (target, target.with_name("target.cache")):
                    shutil.rmtree(path, ignore_errors=True)
                cost = command(words[name], count)()
                sizes[name] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                return cost

            return run

        bench.compare(f"{count:,} pairs of files", "pair", {name: way(name) for name in words})
        console.print("on disk:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()))


def write_pairs(folder: Path, count: int) -> None:
    """`count` JPEGs of about 37 kB, each with a caption of one line."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    small = [Image.fromarray(draw.integers(0, 255, (48, 48, 3), np.uint8)) for _ in range(50)]
    images = [jpeg_of(each.resize((256, 256)), 95) for each in small]
    caption = "a picture of nothing in particular, in colours that were drawn by chance; number {}"
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(images[number % len(images)])
        (folder / f"{number:06d}.txt").write_text(caption.format(number))


def index(bench: Bench) -> None:
    """Both index the same shards."""
    samples = bench.options.samples
    with tempfile.TemporaryDirectory(dir=bench.data) as room:
        folder = Path(room) / "shards"
        write_shards(folder, samples)
        ways = {
            "savable index": [*SAVABLE, "index", str(folder), "--workers=1"],
            "energon prepare": [bench.options.energon, "prepare", *_ENERGON, str(folder)],
        }
        before = partial(strip, folder)
        bench.compare(
            f"{samples:,} samples", "sample", {name: command(words, samples, before) for name, words in ways.items()}
        )


def write_shards(folder: Path, samples: int) -> None:
    """Pairs of random bytes and a caption."""
    noise = np.random.default_rng(0).bytes(2 * PICTURE)
    with sp.ShardWriter(folder, max_samples=10_000, max_bytes=1 << 40) as writer:
        for i in range(samples):
            caption = {"caption": f"a picture of nothing, number {i}", "number": i}
            writer.write({"__key__": f"{i:09d}", "jpg": noise[i % PICTURE :][:PICTURE], "json": caption})


def strip(folder: Path) -> None:
    """Remove every index."""
    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)
    for path in folder.rglob("*.idx"):
        path.unlink()


if __name__ == "__main__":
    main(__doc__, {"convert": convert, "index": index}, pairs=6_000, pythons=[], samples=200_000, energon="energon")

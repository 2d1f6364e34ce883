"""Compare conversion and indexing with other programs. Each is a command with one process that reads.

    python tools/bench/conversion.py convert [--pairs 6000] [--pythons mds=/path/to/python …]
    python tools/bench/conversion.py index [--samples 200000] [--energon /path/to/energon]

`convert` writes a folder of JPEGs and captions with `savable convert`, a loop over webdataset's ShardWriter, LitData's
`optimize`, Mosaic's MDSWriter and HF datasets' `save_to_disk`. `--pythons` names the interpreters in which a library is
installed, if it is not this one.

`index` indexes shards of 10,000 pairs of an image of 2 kB and JSON with `savable index` and `energon prepare`. Existing
indexes are removed before each run.
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
IMAGE_BYTES = 2_000
_ENERGON = ["--num-workers=1", "--non-interactive", "--force-overwrite", "--split-ratio=1,0,0"]
_ENERGON += ["--sample-type=CaptioningSample", '--field-map={"image": "jpg", "caption": "json[caption]"}']


def convert(bench: Bench) -> None:
    """Compare programs that write the same pairs of image and caption."""
    pythons = dict(each.split("=", 1) for each in bench.options.pythons)
    count = bench.options.pairs
    with tempfile.TemporaryDirectory(dir=bench.data) as folder:
        source, target, target_bytes = Path(folder) / "pairs", Path(folder) / "target", dict[str, int]()
        write_pairs(source, count)
        paths = [str(source), str(target)]
        commands = {
            "savable convert": [*SAVABLE, "convert", "--workers", "1", *paths],
            "the same, --no-check-images": [*SAVABLE, "convert", "--workers", "1", "--no-check-images", *paths],
        }
        for name, write in peers.WRITERS.items():
            python = pythons.get(name, sys.executable)
            title = (write.__doc__ or name).rstrip(".").removeprefix("Write with ")
            commands[title] = [python, peers.__file__, "write", name, *paths]

        def way(name: str) -> Way:
            def run() -> Cost:
                for path in (target, target.with_name("target.cache")):
                    shutil.rmtree(path, ignore_errors=True)
                cost = command(commands[name], count)()
                target_bytes[name] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
                return cost

            return run

        bench.compare(f"{count:,} pairs of files", "pair", {name: way(name) for name in commands})
        console.print("on disk:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in target_bytes.items()))


def write_pairs(folder: Path, count: int) -> None:
    """Write `count` JPEGs of about 37 kB, each with a caption of one line."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 255, (48, 48, 3), np.uint8)) for _ in range(50)]
    images = [jpeg_of(each.resize((256, 256)), 95) for each in small]
    caption = "a picture of nothing in particular, in colours that were drawn by chance; number {}"
    for number in range(count):
        (folder / f"{number:06d}.jpg").write_bytes(images[number % len(images)])
        (folder / f"{number:06d}.txt").write_text(caption.format(number))


def index(bench: Bench) -> None:
    """Compare programs that index the same shards."""
    samples = bench.options.samples
    with tempfile.TemporaryDirectory(dir=bench.data) as parent:
        folder = Path(parent) / "shards"
        write_shards(folder, samples)
        commands = {
            "savable index": [*SAVABLE, "index", str(folder), "--workers=1"],
            "energon prepare": [bench.options.energon, "prepare", *_ENERGON, str(folder)],
        }
        before = partial(remove_indexes, folder)
        timed = {name: command(arguments, samples, before) for name, arguments in commands.items()}
        bench.compare(f"{samples:,} samples", "sample", timed)


def write_shards(folder: Path, samples: int) -> None:
    """Write pairs of random bytes and a caption."""
    noise = np.random.default_rng(0).bytes(2 * IMAGE_BYTES)
    with sp.ShardWriter(folder, max_samples=10_000, max_bytes=1 << 40) as writer:
        for i in range(samples):
            caption = {"caption": f"a picture of nothing, number {i}", "number": i}
            writer.write({"__key__": f"{i:09d}", "jpg": noise[i % IMAGE_BYTES :][:IMAGE_BYTES], "json": caption})


def remove_indexes(folder: Path) -> None:
    """Remove all indexes of a dataset."""
    shutil.rmtree(folder / ".nv-meta", ignore_errors=True)
    for path in folder.rglob("*.idx"):
        path.unlink()


if __name__ == "__main__":
    main(__doc__, {"convert": convert, "index": index}, pairs=6_000, pythons=[], samples=200_000, energon="energon")

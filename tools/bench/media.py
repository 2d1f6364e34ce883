"""Measures clips of videos a second with two processes, beside decoders without a loader, by processor time in turns.

python tools/bench/media.py --python Energon=VENV/bin/python --python torchcodec=VENV/bin/python

Clips of 2 s at 8 frames a second, resized to 224 × 224, at random from a tar of 60 videos of 20 s, 640 × 360, H.264.
The others read the same files from the disk's cache (PyAV) or have them in memory already (Energon, torchcodec), and
pass no clip to another process. Those that are not installed in the interpreter named for them are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from apart import Maker, in_turn
from data import FOLDER, prepared
from media_peers import DECODERS, FPS, LENGTH_S, SIDE
from rounds import Loader

import savable_pipeline as sp
from savable_pipeline import custom

WORKERS, SIZE, BATCHES = 2, 4, 12


class RandomClips(sp.TaskEncoder):
    """One clip of a video: uint8 (16, 3, 224, 224)."""

    global_rng = False

    def __init__(self, align: Any) -> None:
        self._clips = sp.Clips(length_s=LENGTH_S, fps=FPS, align=align, size=(SIDE, SIDE))

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self._clips.one(sample.video("mp4"), rng).frames


def loader(folder: Path, align: str = "exact") -> Loader:
    """Batches of clips by our loader."""
    encoder = RandomClips(align)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(str(folder / "000000.tar"), lane), encoder), size=SIZE)

    made = sp.SavableLoader(pipeline, seed=1, lanes=12, num_workers=WORKERS)
    return Loader(iter(made), len, made.close)


def programs(python: str, decoder: str, folder: Path) -> Loader:
    """A decoder in as many processes as our loader has, each making as many clips as a batch has."""
    command = [python, str(Path(__file__).with_name("media_peers.py")), decoder, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[Any] = [subprocess.Popen([*command, str(seed)], env=alone, **pipes) for seed in range(WORKERS)]

    def end() -> None:
        for program in started:
            program.terminate()
            program.wait()

    def answers() -> list[str]:
        return [program.stdout.readline().strip() for program in started]

    def batches() -> Iterator[list[int]]:
        while True:
            for program in started:
                program.stdin.write(f"{SIZE}\n")
                program.stdin.flush()
            yield [int(answer) for answer in answers()]

    if (found := {*answers()}) != {"ready"}:
        end()
        raise ImportError(" ".join(found))
    return Loader(batches(), sum, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", action="append", default=[], metavar="DECODER=PYTHON", help="the interpreter of one"
    )
    parser.add_argument("--only", default="", help="measure those with this in their name, beside our own")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    args = parser.parse_args()
    pythons = dict(one.split("=", 1) for one in args.python)
    folder = prepared(FOLDER, "videos")
    makers: dict[str, Maker] = {"savable_pipeline": lambda: loader(folder)}
    for name in DECODERS:
        python = pythons.get(name.split(",")[0], sys.executable)
        makers[name] = partial(programs, python, name, folder / "files")
    makers["savable_pipeline, from keyframes"] = lambda: loader(folder, "keyframe")
    makers = {name: make for name, make in makers.items() if name == "savable_pipeline" or args.only in name}
    found = in_turn(f"clips of {LENGTH_S:.0f} s, {WORKERS} processes", "clips", makers, BATCHES)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

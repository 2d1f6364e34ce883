"""Reads clips of 2 s of a film of an hour in a tar, on a disk and behind a URL: how much of it is read for them?

    python tools/bench/media_reads.py                        a film of about 600 MB, made in five minutes; then one more
    python tools/bench/media_reads.py --folder FOLDER        keeps it there
    python tools/bench/media_reads.py --minutes 5 --clips 100 --latency-ms 30

Each frame carries its number, under noise. A clip's frames must equal, bit for bit, those of PyAV alone that decodes
the file on from long before them. Must hold: a clip with the headers that it needs reads at most 5 % of the film, in
requests of at most 1 MiB; and memory and descriptors stay as they are over all clips.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from savable_pipeline.data.dataset.kinds import open_any
from savable_pipeline.data.dataset.ref import REF
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.stores.shard_files import ShardFiles

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.media_files import frame_number, numbered_frame
from tests.support.toy_server import serving

FPS, SIZE, NOISE, QUANTIZER = 25, (256, 192), 60, "32"
CLIP_S, RATE = 2.0, 4  # seconds of a clip, and frames a second of it
COLD = 8  # clips that are read each from an empty cache
LEAST = 2 << 20  # bytes that a clip of a short film may take
BEFORE_S = 10  # from where PyAV alone decodes
console = Console()


def make_film(path: Path, minutes: float) -> None:
    """Numbered frames under noise, with a keyframe every 2 s."""
    grain = np.random.default_rng(0).integers(0, NOISE, (SIZE[1] * 4, SIZE[0], 1), np.uint8)
    with av.open(str(path), "w", format="mp4") as made:
        stream: Any = made.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv420p"
        stream.codec_context.options = {"preset": "ultrafast", "qp": QUANTIZER}
        stream.codec_context.gop_size = 2 * FPS
        for number in range(round(minutes * 60 * FPS)):
            top = number * 7 % (SIZE[1] * 3)
            pixels = np.ascontiguousarray(numbered_frame(number & 0xFFFF, SIZE) + grain[top : top + SIZE[1]])
            frame = av.VideoFrame.from_ndarray(pixels, "rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            made.mux(stream.encode(frame))
        made.mux(stream.encode())


def make_tar(folder: Path, minutes: float) -> Path:
    """The film beside its caption in a tar, unless it is there; gives the film's own file."""
    film = folder / f"film-{minutes:g}.mp4"
    if not film.exists():
        make_film(film.with_suffix(".part"), minutes)
        film.with_suffix(".part").rename(film)
    shard = folder / f"data-{minutes:g}/a.tar"
    if not shard.exists():
        shard.parent.mkdir()
        film.with_suffix(".json").write_text('{"caption": "numbers"}')
        with tarfile.open(shard, "w", format=tarfile.USTAR_FORMAT) as tar:
            tar.add(film.with_suffix(".json"), "film.json")
            tar.add(film, "film.mp4")
    open_any(shard.parent)  # makes the index
    return film


def film_of(place: str) -> Sample:
    """The sample of the film, newly opened."""
    return open_any(place).open_samples(np.array([(0, 0)], REF))[0]


def times_of(begin: float) -> list[float]:
    """The times of a clip's frames, in seconds."""
    return [begin + step / RATE for step in range(int(CLIP_S * RATE))]


def decoded_alone(film: Path, times: list[float]) -> NDArray[np.uint8]:
    """The frames on display at these times, by PyAV alone, uint8 (frames, 3, height, width)."""
    found = dict[int, NDArray[np.uint8]]()
    wanted = [int(time_s * FPS + 1e-6) for time_s in times]
    with av.open(str(film)) as container:
        container.seek(max(0, int((times[0] - BEFORE_S) * av.time_base)))
        for frame in container.decode(video=0):
            number = round(float(frame.time) * FPS)
            if number in wanted:
                found[number] = frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
            if number > wanted[-1]:
                break
    return np.stack([found[number] for number in wanted])


def check(frames: NDArray[np.uint8], film: Path, begin: float) -> None:
    """Raises AssertionError unless a clip is what it should be."""
    assert np.array_equal(frames, decoded_alone(film, times_of(begin))), begin
    assert [frame_number(frame) for frame in frames] == [int(t * FPS + 1e-6) & 0xFFFF for t in times_of(begin)], begin


class ReadBytes:
    """Counts the bytes that are read of shards on a disk, by each read."""

    def __init__(self) -> None:
        self.reads: list[int] = []
        self._read = ShardFiles.read

    def __enter__(self) -> ReadBytes:
        def read(files: ShardFiles, shard: int, offset: int, size: int) -> bytes:
            self.reads.append(size)
            return self._read(files, shard, offset, size)

        ShardFiles.read = read  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        ShardFiles.read = self._read  # type: ignore[method-assign]


def begins(film: Path, count: int) -> Iterator[float]:
    """Begins of clips, at times of frames anywhere in the film."""
    with av.open(str(film)) as container:
        frames = int(container.duration / av.time_base * FPS) - int((CLIP_S + 1) * FPS)
    draw = random.Random(5)
    return (draw.randrange(frames) / FPS for _ in range(count))


def resources() -> tuple[float, int]:
    """MB in memory that are this process's own, and open descriptors but those of connections: the server is here."""
    gc.collect()
    opened = [Path(each.path).readlink().name for each in os.scandir("/proc/self/fd") if Path(each.path).is_symlink()]
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1e3, sum("socket:" not in name for name in opened)


def flat(place: str, film: Path, clips: int) -> list[str]:
    """Reads clips, each of a video that is opened for it; memory and descriptors after a tenth, and after all."""
    sample, seen, began = film_of(place), [], time.perf_counter()
    for number, begin in enumerate(begins(film, clips), 1):
        with sample.video("mp4") as video:
            frames = video.frames(times_of(begin))
        if number % 50 == 1:
            check(frames, film, begin)
        if number in (clips // 10, clips):
            seen.append(resources())
    per_clip = (time.perf_counter() - began) / clips
    (memory, descriptors), (last_memory, last_descriptors) = seen
    assert last_descriptors <= descriptors and last_memory < memory + 20, seen
    return [f"{memory:.0f} → {last_memory:.0f} MB", f"{descriptors} → {last_descriptors}", f"{per_clip * 1e3:.1f} ms"]


def row(name: str, reads: list[list[int]], size: int, seconds: list[float], rest: list[str]) -> list[str]:
    """A row of the table; raises AssertionError if a clip read too much."""
    sums, longest = [sum(each) for each in reads], max(max(each) for each in reads)
    assert max(sums) <= max(size / 20, LEAST) and longest <= 1 << 20, (name, sums, longest)
    shares = f"{statistics.median(sums) / size:.2%}, at most {max(sums) / size:.2%}"
    counts = f"{statistics.median(map(len, reads)):.0f} of at most {longest / 1024:.0f} KiB"
    return [name, shares, counts, f"{statistics.median(seconds) * 1e3:.0f} ms", *rest]


def on_disk(folder: Path, film: Path, clips: int) -> list[str]:
    """Clips from a disk."""
    reads, seconds = [], []
    for begin in begins(film, COLD):
        with ReadBytes() as counted:
            began = time.perf_counter()
            frames = film_of(str(folder)).video("mp4").frames(times_of(begin))
            seconds.append(time.perf_counter() - began)
        check(frames, film, begin)
        reads.append(counted.reads)
    return row("on a disk", reads, film.stat().st_size, seconds, flat(str(folder), film, clips))


def behind_url(folder: Path, film: Path, clips: int, latency_s: float) -> list[str]:
    """Clips from a web server, of which each request takes some time."""
    reads, seconds = [], []
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder.parent))
        server.fault = lambda path, number: time.sleep(latency_s)
        for begin in begins(film, COLD):
            os.environ["SAVABLE_CACHE"] = stack.enter_context(tempfile.TemporaryDirectory())
            before = len(server.ranges)
            sample = film_of(f"{server.url}/{folder.name}")
            began = time.perf_counter()
            frames = sample.video("mp4").frames(times_of(begin))
            seconds.append(time.perf_counter() - began)
            check(frames, film, begin)
            reads.append([stop - start for path, start, stop in server.ranges[before:] if path.endswith(".tar")])
        return row(
            f"behind a URL, {latency_s * 1e3:.0f} ms away",
            reads,
            film.stat().st_size,
            seconds,
            flat(f"{server.url}/{folder.name}", film, clips),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the film is made, or lies; by default a temporary folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the film")
    parser.add_argument("--clips", type=int, default=1000, help="of which memory and descriptors are looked at")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="that a request takes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        film = make_tar(folder, given.minutes)
        data = folder / f"data-{given.minutes:g}"
        table = Table("clips of 2 s", "of the film read", "reads", "the first clip", "memory", "descriptors", "a clip")
        for columns in (
            on_disk(data, film, given.clips),
            behind_url(data, film, given.clips, given.latency_ms / 1e3),
        ):
            table.add_row(*columns)
        console.print(f"a film of {given.minutes:g} minutes, {film.stat().st_size / 1e6:.0f} MB")
        console.print(table)


if __name__ == "__main__":
    main()

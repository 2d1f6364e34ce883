"""Test data of the benchmarks: tars of JSON of 1 kB, of images, of blobs of 1 MB, and of videos.

A data set is written once, on first use. `few-json`, `few-parquet` and `few-litdata` have the same 64,000 records in 64
files, so that up to 32 processes can read them.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rounds import console

import savable_pipeline as sp
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.data.dataset.sample_source import DetachedSample

RECORDS, PER_SHARD = 160_000, 10_000
FEW, FEW_PER_SHARD = 64_000, 1_000


def prepare(folder: Path, name: str) -> Path:
    """Return the folder of a data set. It is written if it is missing."""
    makers: dict[str, Callable[[Path], None]] = {
        "json": write_json,
        "parquet": write_parquet,
        "short-json": partial(write_json, record=short_record),
        "few-json": partial(write_json, records=FEW, per_shard=FEW_PER_SHARD),
        "few-parquet": partial(write_parquet, records=FEW, per_shard=FEW_PER_SHARD),
        "few-litdata": write_litdata,
        "images": write_images,
        "photos": lambda target: write_photos(target, 500, 375, 32, 256),
        "large-photos": lambda target: write_photos(target, 4000, 3000, 4, 16),
        "blobs": lambda target: write_random(target, shards=16, samples=32, size=1_000_000),
        "cold": lambda target: write_random(target, shards=20, samples=1_000, size=25_000, part="jpg"),
        "videos": write_videos,
    }
    target = folder / name
    if not (target / "done").exists():
        console.print(f"writing the data to {target}")
        target.mkdir(parents=True, exist_ok=True)
        makers[name](target)
        if any(target.glob("*.tar")):
            sp.TarShardReader(str(target), sp.Lane())  # writes the indexes
        (target / "done").touch()
    return target


def json_record(number: int) -> dict[str, Any]:
    """Build a record whose JSON is about 1 kB long."""
    rng = np.random.default_rng(number)
    words = [f"w{word:05d}" for word in rng.integers(0, 50_000, 120)]
    url = f"http://example.com/{number}"
    return {"id": number, "url": url, "score": float(rng.random()), "text": " ".join(words)}


def short_record(number: int) -> dict[str, Any]:
    """Build a record whose JSON is about 150 bytes long."""
    return {"id": number, "text": json_record(number)["text"][:125]}


def few_records(record: Callable[[int], Any] = json_record) -> list[dict[str, bytes]]:
    """Build 20,000 samples with a JSON part, in memory."""
    return [{"json": json.dumps(record(i)).encode()} for i in range(20_000)]


def write_json(folder: Path, records: int = RECORDS, per_shard: int = PER_SHARD, record: Any = json_record) -> None:
    """Write tars of JSON records, with the metadata that Energon reads."""
    counts = {}
    for first in range(0, records, per_shard):
        name = f"{first // per_shard:06d}.tar"
        numbers = range(first, first + per_shard)
        write_tar(folder / name, ({"json": json.dumps(record(i)).encode()} for i in numbers))
        counts[name] = per_shard
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": list(counts)}, "exclude": []}))
    (meta / "dataset.yaml").write_text(json.dumps({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}))


def write_parquet(folder: Path, records: int = RECORDS, per_shard: int = PER_SHARD) -> None:
    """Write the same records as Parquet columns, the format that HF datasets reads fastest."""
    import pyarrow
    from pyarrow import parquet

    for first in range(0, records, per_shard):
        table = pyarrow.Table.from_pylist([json_record(i) for i in range(first, first + per_shard)])
        parquet.write_table(table, folder / f"{first // per_shard:06d}.parquet")


def write_litdata(folder: Path) -> None:
    """Write the 64,000 records of `few-json` as LitData chunks."""
    from litdata import optimize

    optimize(json_record, list(range(FEW)), str(folder), chunk_size=FEW_PER_SHARD, num_workers=1, verbose=False)


def write_images(folder: Path, shards: int = 2, per_shard: int = 6_000) -> None:
    """Write tars of images with captions. There are 64 distinct images, 256 × 256 pixels and 25 kB each."""
    rng = np.random.default_rng(0)
    small = [Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8)) for _ in range(64)]
    images = [jpeg_of(each.resize((256, 256), Image.Resampling.NEAREST), 93) for each in small]
    for shard in range(shards):
        samples = ({"jpg": images[i % 64], "txt": b"a picture"} for i in range(per_shard))
        write_tar(folder / f"{shard:06d}.tar", samples)


def write_photos(folder: Path, width: int, height: int, distinct: int, samples: int) -> None:
    """Write four shards of JPEGs with the frequency spectrum of photographs.

    Args:
        folder: Where to write.
        width: Width of each image, in pixels.
        height: Height of each image, in pixels.
        distinct: The number of distinct images, which repeat.
        samples: The number of images of each shard.
    """
    jpegs = [jpeg_of(scene(width, height, seed)) for seed in range(distinct)]
    for shard in range(4):
        write_tar(folder / f"{shard:06d}.tar", ({"jpg": jpegs[i % distinct]} for i in range(samples)))


def write_random(folder: Path, *, shards: int, samples: int, size: int, part: str = "bin") -> None:
    """Write shards whose samples have one part of random bytes."""
    rng = np.random.default_rng(0)
    for shard in range(shards):
        write_tar(folder / f"{shard:06d}.tar", ({part: rng.bytes(size)} for _ in range(samples)))


def write_videos(folder: Path, distinct: int = 6, videos: int = 60) -> None:
    """Write videos as a tar and as single files.

    Each lasts 20 s and has 640 × 360 pixels, 30 frames per second and a keyframe every 2 s.
    """
    encoded = [_video(seed) for seed in range(distinct)]
    write_tar(folder / "000000.tar", ({"mp4": encoded[i % distinct]} for i in range(videos)))
    (folder / "files").mkdir(exist_ok=True)
    for i in range(videos):
        (folder / "files" / f"{i:06d}.mp4").write_bytes(encoded[i % distinct])


def _video(seed: int, frames: int = 600, width: int = 640, height: int = 360) -> bytes:
    """Encode a video of a camera that pans over a `scene`, with sensor noise in each frame."""
    import av

    file, rng = io.BytesIO(), np.random.default_rng(seed)
    wide = np.asarray(scene(width + frames, height + frames // 4, seed)).astype(np.int16)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": "60"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            view = wide[i // 4 : i // 4 + height, i : i + width]
            noisy = (view + rng.integers(-4, 5, (height, width, 1), np.int16)).clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noisy, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def write_tar(path: Path, samples: Iterable[Mapping[str, bytes]]) -> None:
    """Write one shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, sample in enumerate(samples):
            for extension, raw in sample.items():
                member = tarfile.TarInfo(f"{path.stem}_{i:06d}.{extension}")
                member.size = len(raw)
                tar.addfile(member, io.BytesIO(raw))


def records_of(folder: Path, count: int) -> list[dict[str, bytes]]:
    """Return the distinct images among the first `count` samples of a folder of tars."""
    samples = itertools.islice(sp.TarShardReader(str(folder), sp.Lane(), shuffle=False), count)
    return list({raw: {"jpg": raw} for raw in (sample["jpg"] for sample in samples)}.values())


def sample_of(jpeg: bytes) -> sp.Sample:
    """Return a sample with this image as its only part."""
    return Sample(DetachedSample(1, "a", "0.tar", 0, {"jpg": jpeg}), 0, 0, 0, 0)


def jpeg_of(image: Image.Image, quality: int = 90, subsampling: str = "4:2:0") -> bytes:
    """Encode an image as JPEG. The defaults resemble those of cameras."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Draw an image with the frequency spectrum of a photograph: equal noise in each octave, and sensor noise."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        grid = rng.normal(0, 14, (max(2, height >> octave), max(2, width >> octave), 2)).astype(np.float32)
        grey, tint = (resize_smoothly(grid[..., channel], width, height) for channel in range(2))
        pixels += grey[..., None] + 0.3 * tint[..., None] * np.array([1, 0, -1], np.float32)
    noise = rng.standard_normal((height, width, 1), np.float32) * 2
    return Image.fromarray(np.clip(pixels + noise + 118, 0, 255).astype(np.uint8))


def resize_smoothly(grid: Any, width: int, height: int) -> Any:
    """Resize a grid of numbers smoothly to `width` × `height` values."""
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC))


def digits_in_scenes(width: int, height: int) -> list[tuple[bytes, int]]:
    """Return scikit-learn's 1,797 scanned digits as JPEGs, with their labels.

    Each digit is faint, at a random position in a random scene.
    """
    from sklearn.datasets import load_digits

    loaded, digits = load_digits(), []
    backgrounds = [np.asarray(scene(width, height, seed), np.float32) for seed in range(16)]
    for number, (grey, label) in enumerate(zip(loaded.images, loaded.target, strict=True)):
        rng = np.random.default_rng(number)
        side = int(rng.integers(height // 2, height * 3 // 4))
        left, upper = int(rng.integers(width - side)), int(rng.integers(height - side))
        pixels = np.roll(backgrounds[number % 16], tuple(rng.integers(0, 300, 2)), (0, 1))
        pixels[upper : upper + side, left : left + side] += 5 * resize_smoothly(np.float32(grey), side, side)[..., None]
        digits.append((jpeg_of(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))), int(label)))
    return digits

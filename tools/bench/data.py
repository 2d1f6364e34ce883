"""The data that the benchmarks read, written once: tars of JSON of 1 kB, of images, of blobs of 1 MB, of videos.

`few-json`, `few-parquet` and `few-litdata` are the same 64,000 records in 64 files, for up to 32 processes that read.
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

TEXTS, TEXTS_PER_SHARD = 160_000, 10_000
FEW, FEW_PER_SHARD = 64_000, 1_000


def prepared(folder: Path, name: str) -> Path:
    """The folder of the data of this name, written first if it is not there."""
    makers: dict[str, Callable[[Path], None]] = {
        "json": write_json,
        "parquet": write_parquet,
        "short-json": partial(write_json, record=short_record),
        "few-json": partial(write_json, texts=FEW, per_shard=FEW_PER_SHARD),
        "few-parquet": partial(write_parquet, texts=FEW, per_shard=FEW_PER_SHARD),
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
            sp.TarShardReader(str(target), sp.Lane())  # makes the indexes
        (target / "done").touch()
    return target


def json_record(number: int) -> dict[str, Any]:
    """A record that is 1 kB as JSON."""
    draw = np.random.default_rng(number)
    words = [f"w{word:05d}" for word in draw.integers(0, 50_000, 120)]
    url = f"http://example.com/{number}"
    return {"id": number, "url": url, "score": float(draw.random()), "text": " ".join(words)}


def short_record(number: int) -> dict[str, Any]:
    """A record that is 150 bytes as JSON."""
    return {"id": number, "text": json_record(number)["text"][:125]}


def few_records(record: Callable[[int], Any] = json_record) -> list[dict[str, bytes]]:
    """Samples of JSON in memory."""
    return [{"json": json.dumps(record(i)).encode()} for i in range(20_000)]


def write_json(folder: Path, texts: int = TEXTS, per_shard: int = TEXTS_PER_SHARD, record: Any = json_record) -> None:
    """Records as JSON, with the metadata that Energon reads."""
    counts = {}
    for first in range(0, texts, per_shard):
        name = f"{first // per_shard:06d}.tar"
        numbers = range(first, first + per_shard)
        write_tar(folder / name, ({"json": json.dumps(record(i)).encode()} for i in numbers))
        counts[name] = per_shard
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": list(counts)}, "exclude": []}))
    (meta / "dataset.yaml").write_text(json.dumps({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}))


def write_parquet(folder: Path, texts: int = TEXTS, per_shard: int = TEXTS_PER_SHARD) -> None:
    """The records of the JSON shards as columns, which is what HF datasets reads fastest."""
    import pyarrow
    from pyarrow import parquet

    for first in range(0, texts, per_shard):
        table = pyarrow.Table.from_pylist([json_record(i) for i in range(first, first + per_shard)])
        parquet.write_table(table, folder / f"{first // per_shard:06d}.parquet")


def write_litdata(folder: Path) -> None:
    """The few records in the chunks that LitData writes."""
    from litdata import optimize

    optimize(json_record, list(range(FEW)), str(folder), chunk_size=FEW_PER_SHARD, num_workers=1, verbose=False)


def write_images(folder: Path, shards: int = 2, per_shard: int = 6_000) -> None:
    """64 different images of 25 kB, 256 pixels wide and high, each with a caption."""
    draw = np.random.default_rng(0)
    small = [Image.fromarray(draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)) for _ in range(64)]
    images = [jpeg_of(each.resize((256, 256), Image.Resampling.NEAREST), 93) for each in small]
    for shard in range(shards):
        samples = ({"jpg": images[i % 64], "txt": b"a picture"} for i in range(per_shard))
        write_tar(folder / f"{shard:06d}.tar", samples)


def write_photos(folder: Path, width: int, height: int, different: int, samples: int) -> None:
    """Four shards of JPEGs with the spectrum of photographs."""
    jpegs = [jpeg_of(scene(width, height, seed)) for seed in range(different)]
    for shard in range(4):
        write_tar(folder / f"{shard:06d}.tar", ({"jpg": jpegs[i % different]} for i in range(samples)))


def write_random(folder: Path, *, shards: int, samples: int, size: int, part: str = "bin") -> None:
    """Samples of one part of random bytes."""
    draw = np.random.default_rng(0)
    for shard in range(shards):
        write_tar(folder / f"{shard:06d}.tar", ({part: draw.bytes(size)} for _ in range(samples)))


def write_videos(folder: Path, different: int = 6, videos: int = 60) -> None:
    """A tar of videos of 20 s, 640 × 360 at 30 frames a second with a keyframe every 2 s; and the same as files."""
    encoded = [_video(seed) for seed in range(different)]
    write_tar(folder / "000000.tar", ({"mp4": encoded[i % different]} for i in range(videos)))
    (folder / "files").mkdir(exist_ok=True)
    for i in range(videos):
        (folder / "files" / f"{i:06d}.mp4").write_bytes(encoded[i % different])


def _video(seed: int, frames: int = 600, width: int = 640, height: int = 360) -> bytes:
    """A scene with the spectrum of a photograph, over which the camera pans, with the noise of a sensor."""
    import av

    file, draw = io.BytesIO(), np.random.default_rng(seed)
    wide = np.asarray(scene(width + frames, height + frames // 4, seed)).astype(np.int16)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": "60"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            view = wide[i // 4 : i // 4 + height, i : i + width]
            noisy = (view + draw.integers(-4, 5, (height, width, 1), np.int16)).clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noisy, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def write_tar(path: Path, samples: Iterable[Mapping[str, bytes]]) -> None:
    """One shard."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, sample in enumerate(samples):
            for extension, raw in sample.items():
                member = tarfile.TarInfo(f"{path.stem}_{i:06d}.{extension}")
                member.size = len(raw)
                tar.addfile(member, io.BytesIO(raw))


def records_of(folder: Path, count: int) -> list[dict[str, bytes]]:
    """The different images among the first samples of a folder of tars, in memory."""
    samples = itertools.islice(sp.TarShardReader(str(folder), sp.Lane(), shuffle=False), count)
    return list({raw: {"jpg": raw} for raw in (sample["jpg"] for sample in samples)}.values())


# Images in memory.


def sample_of(jpeg: bytes) -> sp.Sample:
    """A sample with this image alone."""
    return Sample(DetachedSample(1, "a", "0.tar", 0, {"jpg": jpeg}), 0, 0, 0, 0)


def jpeg_of(image: Image.Image, quality: int = 90, subsampling: str = "4:2:0") -> bytes:
    """A JPEG as cameras write them."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=subsampling)
    return file.getvalue()


def scene(width: int, height: int, seed: int) -> Image.Image:
    """Noise of the same strength in each octave of frequencies, as photographs have it, and a sensor's noise."""
    draw = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        grid = draw.normal(0, 14, (max(2, height >> octave), max(2, width >> octave), 2)).astype(np.float32)
        grey, tint = (enlarged(grid[..., channel], width, height) for channel in range(2))
        pixels += grey[..., None] + 0.3 * tint[..., None] * np.array([1, 0, -1], np.float32)
    noise = draw.standard_normal((height, width, 1), np.float32) * 2
    return Image.fromarray(np.clip(pixels + noise + 118, 0, 255).astype(np.uint8))


def enlarged(grid: Any, width: int, height: int) -> Any:
    """A grid as smooth values of so many pixels."""
    return np.asarray(Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC))


def digits_in_scenes(width: int, height: int) -> list[tuple[bytes, int]]:
    """Scikit-learn's 1,797 scanned digits, each faint somewhere in a scene of its own, and which digit it is."""
    from sklearn.datasets import load_digits

    loaded, digits = load_digits(), []
    backgrounds = [np.asarray(scene(width, height, seed), np.float32) for seed in range(16)]
    for number, (grey, label) in enumerate(zip(loaded.images, loaded.target, strict=True)):
        draw = np.random.default_rng(number)
        side = int(draw.integers(height // 2, height * 3 // 4))
        left, upper = int(draw.integers(width - side)), int(draw.integers(height - side))
        pixels = np.roll(backgrounds[number % 16], tuple(draw.integers(0, 300, 2)), (0, 1))
        pixels[upper : upper + side, left : left + side] += 5 * enlarged(np.float32(grey), side, side)[..., None]
        digits.append((jpeg_of(Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))), int(label)))
    return digits

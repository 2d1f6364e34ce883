"""The data that the benchmarks read: written once: tars of JSON of 1 kB, images of 25 kB to 4 MB and blobs of 1 MB.

`few-json`, `few-parquet` and `few-litdata` are the same 64,000 records in 64 files, for up to 32 processes that read.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

import savable_pipeline as sp

FOLDER = Path(tempfile.gettempdir()) / "savable_pipeline_bench"
TEXTS, TEXTS_PER_SHARD = 160_000, 10_000
FEW, FEW_PER_SHARD = 64_000, 1_000
IMAGES, IMAGES_PER_SHARD = 120_000, 6_000
BLOBS, BLOBS_PER_SHARD, BLOB_BYTES = 512, 32, 1_000_000
console = Console(width=130)


def prepared(folder: Path, name: str) -> Path:
    """The folder of the data of this name, written first if it is not there."""
    makers: dict[str, Callable[[Path], None]] = {
        "json": _write_json, "images": _write_images, "blobs": _write_blobs, "parquet": _write_parquet,
        "few-json": partial(_write_json, texts=FEW, per_shard=FEW_PER_SHARD),
        "few-parquet": partial(_write_parquet, texts=FEW, per_shard=FEW_PER_SHARD),
        "few-litdata": _write_litdata,
        "photos": lambda place: _write_photos(place, 500, 375, 32, 256),
        "videos": _write_videos,
        "large-photos": lambda place: _write_photos(place, 4000, 3000, 4, 16),
    }  # fmt: skip
    place = folder / name
    if not (place / "done").exists():
        console.print(f"writing the data to {place}")
        place.mkdir(parents=True, exist_ok=True)
        makers[name](place)
        (place / "done").touch()
    return place


def json_record(number: int) -> dict[str, Any]:
    """A record that is 1 kB as JSON."""
    draw = np.random.default_rng(number)
    words = [f"w{word:05d}" for word in draw.integers(0, 50_000, 120)]
    url = f"http://example.com/{number}"
    return {"id": number, "url": url, "score": float(draw.random()), "text": " ".join(words)}


def _write_json(folder: Path, texts: int = TEXTS, per_shard: int = TEXTS_PER_SHARD) -> None:
    """With the metadata that Energon reads."""
    counts = {}
    for first in range(0, texts, per_shard):
        name = f"{first // per_shard:06d}.tar"
        numbers = range(first, first + per_shard)
        _write_tar(folder / name, ({"json": json.dumps(json_record(i)).encode()} for i in numbers))
        counts[name] = per_shard
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    (meta / "split.yaml").write_text(json.dumps({"split_parts": {"train": list(counts)}, "exclude": []}))
    (meta / "dataset.yaml").write_text(json.dumps({"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}))
    sp.TarShardReader(str(folder), sp.Lane())  # makes the indexes


def _write_parquet(folder: Path, texts: int = TEXTS, per_shard: int = TEXTS_PER_SHARD) -> None:
    """The records of the JSON shards as columns, which is what HF datasets reads fastest."""
    import pyarrow
    from pyarrow import parquet

    for first in range(0, texts, per_shard):
        table = pyarrow.Table.from_pylist([json_record(i) for i in range(first, first + per_shard)])
        parquet.write_table(table, folder / f"{first // per_shard:06d}.parquet")


def _write_litdata(folder: Path) -> None:
    """The few records in the chunks that LitData writes."""
    from litdata import optimize

    optimize(json_record, list(range(FEW)), str(folder), chunk_size=FEW_PER_SHARD, num_workers=1, verbose=False)


def _write_images(folder: Path) -> None:
    """64 different images, each with a caption."""
    images = few_jpegs()
    for shard in range(IMAGES // IMAGES_PER_SHARD):
        samples = ({"jpg": images[i % 64], "txt": b"a picture"} for i in range(IMAGES_PER_SHARD))
        _write_tar(folder / f"{shard:06d}.tar", samples)


def few_jpegs() -> list[bytes]:
    """64 different images, 256 pixels wide and high."""
    draw = np.random.default_rng(0)
    return [_jpeg(draw.integers(0, 256, (24, 24, 3), dtype=np.uint8)) for _ in range(64)]


def _write_photos(folder: Path, width: int, height: int, different: int, samples: int) -> None:
    """Four shards of JPEGs with the spectrum of photographs."""
    from photos import jpeg_of, scene

    jpegs = [jpeg_of(scene(width, height, seed)) for seed in range(different)]
    for shard in range(4):
        _write_tar(folder / f"{shard:06d}.tar", ({"jpg": jpegs[i % different]} for i in range(samples)))


def _write_videos(folder: Path, different: int = 6, videos: int = 60) -> None:
    """A tar of videos of 20 s, 640 × 360 at 30 frames a second with a keyframe every 2 s; and the same as files."""
    made = [_video(seed) for seed in range(different)]
    _write_tar(folder / "000000.tar", ({"mp4": made[i % different]} for i in range(videos)))
    (folder / "files").mkdir(exist_ok=True)
    for i in range(videos):
        (folder / "files" / f"{i:06d}.mp4").write_bytes(made[i % different])


def _video(seed: int, frames: int = 600, width: int = 640, height: int = 360) -> bytes:
    """A scene with the spectrum of a photograph, over which the camera pans, with the noise of a sensor."""
    import av
    from photos import scene

    file, draw = io.BytesIO(), np.random.default_rng(seed)
    wide = np.asarray(scene(width + frames, height + frames // 4, seed)).astype(np.int16)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=30, options={"preset": "veryfast", "g": "60"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for i in range(frames):
            seen = wide[i // 4 : i // 4 + height, i : i + width]
            noisy = (seen + draw.integers(-4, 5, (height, width, 1), np.int16)).clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noisy, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _jpeg(pixels: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).resize((256, 256), Image.Resampling.NEAREST).save(file, "JPEG", quality=93)
    return file.getvalue()


def _write_blobs(folder: Path) -> None:
    draw = np.random.default_rng(0)
    for shard in range(BLOBS // BLOBS_PER_SHARD):
        _write_tar(folder / f"{shard:06d}.tar", ({"bin": draw.bytes(BLOB_BYTES)} for _ in range(BLOBS_PER_SHARD)))


def _write_tar(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for i, sample in enumerate(samples):
            for extension, raw in sample.items():
                member = tarfile.TarInfo(f"{path.stem}_{i:06d}.{extension}")
                member.size = len(raw)
                tar.addfile(member, io.BytesIO(raw))

"""The folders `shards/`, `speech/`, `films/` and `corpus/` that examples in docstrings and on pages read."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

from PIL import Image

from tests.support.shards import write_tar
from tests.support.toy_files import jpeg

SHARDS, SAMPLES = 4, 25  # number of shards, and of samples in each


def write_example_shards(folder: Path) -> None:
    """Write 100 samples: `jpg`, 32 × 32; `txt`, its caption; `cls`, 0 to 9; `json`, a conversation and a document."""
    for shard in range(SHARDS):
        members = []
        for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
            for extension, content in _sample(number).items():
                members.append((f"{number:06d}.{extension}", content))
        write_tar(folder / f"{shard:06d}.tar", members)


def write_example_speech(folder: Path) -> None:
    """Write 20 samples: `wav`, one second at 8 kHz, nearly silent; `txt`."""
    members = []
    for number in range(20):
        file = io.BytesIO()
        with wave.open(file, "wb") as sound:
            sound.setparams((1, 2, 8_000, 0, "NONE", ""))
            sound.writeframes(bytes([number, 0]) * 8_000)
        members += [(f"{number:06d}.wav", file.getvalue()), (f"{number:06d}.txt", f"sound {number}".encode())]
    write_tar(folder / "000000.tar", members)


def write_example_films(folder: Path) -> None:
    """Write 6 samples: `mp4`, 4 s of 64 × 48 pixels at 10 frames per second, with a tone; `txt`."""
    from tests.support.media_files import video_bytes  # imported here because most examples need no video

    film = video_bytes(40, fps=10, audio="aac")
    write_tar(folder / "0.tar", [(f"film{n}.{x}", d) for n in range(6) for x, d in (("mp4", film), ("txt", b"a film"))])


def write_example_corpus(folder: Path) -> None:
    """Write a table `segments.parquet` whose rows name seconds of `wav/show.wav`, 2 s at 8 kHz."""
    import pyarrow as pa  # imported here because most examples need neither
    import pyarrow.parquet as pq

    from tests.support.media_files import audio_bytes

    (folder / "wav").mkdir(parents=True)
    (folder / "wav/show.wav").write_bytes(audio_bytes(2.0, rate=8000, container="wav"))
    rows = [{"path": "wav/show.wav", "start": 0.5, "end": 1.5, "text": "a second of it"}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "segments.parquet")


def write_numbered_pictures(folder: Path) -> None:
    """Write 400 samples in 0.tar … 3.tar, with keys s000000 …: `json`, {"id": number}; `txt`; `png`, 8 × 8."""
    for shard in range(4):
        members = []
        for number in range(100 * shard, 100 * (shard + 1)):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (number % 256, 7, 7)).save(picture, "PNG")
            key = f"s{number:06d}"
            members.append((f"{key}.json", json.dumps({"id": number}).encode()))
            members += [(f"{key}.txt", f"picture {number}".encode()), (f"{key}.png", picture.getvalue())]
        write_tar(folder / f"{shard}.tar", members)


def _sample(number: int) -> dict[str, bytes]:
    caption = f"picture {number}"
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": caption}]
    record = {"conversations": turns, "texts": [caption, None], "images": [None, "jpg"]}
    return {
        "jpg": jpeg(number, side=32),
        "txt": caption.encode(),
        "cls": str(number % 10).encode(),
        "json": json.dumps(record).encode(),
    }

"""A LeRobot folder, version 3, by its documented format. The frames of its episodes show their number in the video."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.support.media_files import numbered_frame, video_bytes

FPS = 10
TOP = "observation.images.top"
LENGTHS = [12, 17, 22, 9]  # numbers of frames of the episodes
# chunk and file of each episode
VIDEO_FILES, DATA_FILES = [(0, 0), (0, 0), (0, 0), (1, 0)], [(0, 0), (0, 1), (0, 1), (0, 1)]
FEATURES: dict[str, Any] = {
    TOP: {"dtype": "video", "shape": [48, 64, 3]},
    "observation.state": {"dtype": "float32", "shape": [2]},
    "action": {"dtype": "float32", "shape": [3, 2]},
    "task": {"dtype": "string", "shape": [1]},
    **{name: {"dtype": "int64", "shape": [1]} for name in ("index", "episode_index")},
}
INFO: dict[str, Any] = {
    "codebase_version": "v3.0",
    "fps": FPS,
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    "features": FEATURES,
}


def _file(folder: Path, kind: str, chunk: int, file: int, suffix: str) -> Path:
    path = folder / kind / f"chunk-{chunk:03d}" / f"file-{file:03d}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _where(episode: int, begin: int) -> dict[str, Any]:
    """Return the columns with the location of an episode's video."""
    chunk, file = VIDEO_FILES[episode]
    seconds = {"from_timestamp": begin / FPS, "to_timestamp": (begin + LENGTHS[episode]) / FPS}
    return {
        f"videos/{TOP}/{name}": value for name, value in {"chunk_index": chunk, "file_index": file, **seconds}.items()
    }


def _png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(numbered_frame(number, (64, 48), noise=10)).save(file, "PNG")
    return file.getvalue()


def write_lerobot(folder: Path, *, images: bool = False, lacking: int = 0, **info: Any) -> Path:
    """Write the folder, and return it.

    The state of a frame is its number in its video, then its number among all frames. `images` writes images in place
    of
    videos, as LeRobot's `use_videos=False`. `lacking` last frames are missing from the videos.
    """
    firsts = np.cumsum([0, *LENGTHS])
    begins = [
        sum(n for n, file in zip(LENGTHS[:e], VIDEO_FILES, strict=False) if file == VIDEO_FILES[e]) for e in range(4)
    ]
    for chunk, file in () if images else sorted(set(VIDEO_FILES)):
        frames = sum(n for n, each in zip(LENGTHS, VIDEO_FILES, strict=True) if each == (chunk, file)) - lacking
        _file(folder, f"videos/{TOP}", chunk, file, ".mp4").write_bytes(video_bytes(frames, fps=FPS, noise=10))
    for chunk, file in sorted(set(DATA_FILES)):
        rows = [
            {
                "observation.state": [float(begins[e] + i), float(firsts[e] + i)],
                "action": [[float(i), float(e)]] * 3,
                "task": f"pick {i}",
                **({TOP: {"bytes": _png(begins[e] + i), "path": f"frame-{i:06d}.png"}} if images else {}),
                "index": int(firsts[e]) + i,
                "episode_index": e,
            }
            for e in range(4)
            if DATA_FILES[e] == (chunk, file)
            for i in range(LENGTHS[e])
        ]
        kinds: dict[str, Any] = {TOP: pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
        kinds |= {"observation.state": pa.list_(pa.float32(), 2), "action": pa.list_(pa.list_(pa.float32()))}
        schema = pa.schema([(name, kinds.get(name, pa.string() if name == "task" else pa.int64())) for name in rows[0]])
        pq.write_table(
            pa.Table.from_pylist(rows, schema=schema), _file(folder, "data", chunk, file, ".parquet"), row_group_size=10
        )
    episodes = [
        {
            "episode_index": e,
            "tasks": [f"task {e}"],
            "length": LENGTHS[e],
            "data/chunk_index": DATA_FILES[e][0],
            "data/file_index": DATA_FILES[e][1],
            "dataset_from_index": int(firsts[e]),
            "dataset_to_index": int(firsts[e + 1]),
            **({} if images else _where(e, begins[e])),
            "stats/action/min": [0.0],
        }
        for e in range(4)
    ]
    for file in range(2):
        table = pa.Table.from_pylist(episodes[2 * file : 2 * file + 2])
        pq.write_table(table, _file(folder, "meta/episodes", 0, file, ".parquet"))
    pq.write_table(pa.table({"task_index": [0]}), folder / "meta/tasks.parquet")
    features = {**FEATURES, TOP: {**FEATURES[TOP], "dtype": "image" if images else "video"}}
    (folder / "meta/info.json").write_text(json.dumps({**INFO, "features": features, **info}))
    return folder

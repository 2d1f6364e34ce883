"""What Mosaic Streaming and LitData wrote, converted: equal to what their own readers give.

Their libraries are no part of this environment, so another interpreter writes the data: `SAVABLE_PEERS_PYTHON` names
one that has both (`pip install mosaicml-streaming litdata`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.convert import Options, convert

PYTHON = os.environ.get("SAVABLE_PEERS_PYTHON", "")
pytestmark = [pytest.mark.long, pytest.mark.skipif(not PYTHON, reason="SAVABLE_PEERS_PYTHON names no interpreter")]

ROWS = """
import io, json, sys
import numpy as np
from PIL import Image

def image(i):
    return Image.fromarray(np.random.default_rng(i).integers(0, 255, (16, 12, 3), np.uint8))

def jpeg(i):
    file = io.BytesIO()
    image(i).save(file, "JPEG")
    return file.getvalue()
"""

MDS = """
from streaming import MDSWriter, StreamingDataset
columns = dict(image="jpeg", mask="png", raw="bytes", caption="str", label="int", score="float32", vector="ndarray",
               fixed="ndarray:int16:2", meta="json", pixels="pil", big="str_int", half="float16")
packing = json.loads(sys.argv[2])
with MDSWriter(out=sys.argv[1], columns=columns, size_limit=1 << 16, **packing) as writer:
    for i in range(100):
        writer.write(dict(image=image(i), mask=image(i), raw=jpeg(i), caption=f"é {i}", label=-i, score=i / 8, meta=[i],
                          vector=np.full((i % 3 + 1, 2), i, np.float64), fixed=np.full(2, i, np.int16), pixels=image(i),
                          big=10**i, half=i / 2))
rows = []
for row in StreamingDataset(local=sys.argv[1], shuffle=False, batch_size=1):
    values = {n: row[n] for n in ("caption", "label", "score", "big", "half", "meta")}
    values |= {n: value.item() for n, value in values.items() if hasattr(value, "item")}
    rows.append([values, row["raw"].hex(), row["vector"].tolist(), row["fixed"].tolist(),
                 *(np.asarray(row[n]).tolist() for n in ("pixels", "image", "mask"))])
print(json.dumps(rows))
"""

LITDATA = """
import torch
from litdata.streaming.cache import Cache
from litdata import StreamingDataset
packing = json.loads(sys.argv[2])
cache = Cache(sys.argv[1], chunk_size=16, **packing)
for i in range(100):
    cache[i] = {"pixels": image(i), "raw": jpeg(i), "caption": f"é {i}", "label": -i, "score": i / 8, "ok": i % 2 == 0,
                "vector": np.full((i % 3 + 1, 2), i, np.float64), "fixed": np.full(2, i, np.int16),
                "tensor": torch.full((2, 2), i), "meta": {"a": [i, "x"], "b": [{"k": i}]}}
cache.done(); cache.merge()
rows = []
for row in StreamingDataset(sys.argv[1], shuffle=False):
    values = {n: row[n] for n in ("caption", "label", "score", "ok", "meta")}
    rows.append([values, bytes(row["raw"]).hex(), row["vector"].tolist(), row["fixed"].tolist(),
                 np.asarray(row["pixels"]).tolist(), row["tensor"].tolist()])
print(json.dumps(rows))
"""


def written(program: str, folder: Path, packing: str) -> list[list[object]]:
    """Write a dataset with the library of a peer; gives what its own reader says is in it."""
    home = {**os.environ, "HOME": str(folder.parent), "PYTHONPATH": ""}
    command = [PYTHON, "-W", "ignore", "-c", ROWS + program, str(folder), packing]
    done = subprocess.run(command, env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def samples(source: Path, target: Path) -> list[sp.Sample]:
    report = convert(source, target, Options(shard_samples=30))
    assert (report.samples, report.rejected) == (100, [])
    return list(sp.TarShardReader(target, sp.Lane(), shuffle=False, epochs=1))


def array(sample: sp.Sample, name: str) -> object:
    import io

    return np.load(io.BytesIO(sample[name])).tolist()


@pytest.mark.parametrize(
    "packing", ["{}", '{"compression": "zstd"}', '{"compression": "gz:5"}', '{"compression": "bz2"}']
)
def test_mds_as_mosaic_streaming_writes_it(tmp_path: Path, packing: str) -> None:
    expected = written(MDS, tmp_path / "in", packing)
    for sample, (values, raw, vector, fixed, pixels, image, mask) in zip(
        samples(tmp_path / "in", tmp_path / "out"), expected, strict=True
    ):
        assert sample.json() == values
        assert sample["raw.jpg"].hex() == raw
        assert (array(sample, "vector.npy"), array(sample, "npy")) == (vector, fixed)
        assert np.asarray(sample.image("jpg")).tolist() == image
        assert np.asarray(sample.image("png")).tolist() == mask
        assert np.asarray(sample.image("pixels.png")).tolist() == pixels


@pytest.mark.parametrize("packing", ["{}", '{"compression": "zstd", "compression_level": "chunk"}'])
def test_chunks_as_litdata_writes_them(tmp_path: Path, packing: str) -> None:
    expected = written(LITDATA, tmp_path / "in", packing)
    for sample, (values, raw, vector, fixed, pixels, tensor) in zip(
        samples(tmp_path / "in", tmp_path / "out"), expected, strict=True
    ):
        assert sample.json() == values
        assert sample["jpg"].hex() == raw
        assert [array(sample, name) for name in ("npy", "fixed.npy", "tensor.npy")] == [vector, fixed, tensor]
        assert np.asarray(sample.image("png")).tolist() == pixels

"""What Mosaic Streaming, LitData, HF datasets and webdataset wrote, converted: equal to what their own readers give.

Their libraries are no part of this environment, so another interpreter writes the data: `SAVABLE_PEERS_PYTHON` names
one that has them (`pip install mosaicml-streaming litdata datasets webdataset`).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.toy_server import serving
from tests.support.url_sources import written_files

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

ROWS_OF_LITDATA = """
from litdata import optimize, StreamingDataset
def row(i):
    return {"image": jpeg(i), "caption": f"é {i}", "label": -i, "score": i / 8, "tags": ["a"] * (i % 3)}
if __name__ == "__main__":
    optimize(fn=row, inputs=list(range(100)), output_dir=sys.argv[1], num_workers=1, chunk_size=16,
             **json.loads(sys.argv[2]))
    rows = []
    for row in StreamingDataset(sys.argv[1], shuffle=False):
        image = bytes(row.pop("image")).hex()
        rows.append([row, image])
    print(json.dumps(rows))
"""

HUGGING_FACE = """
import datasets
from pathlib import Path
rows = [{"image": {"bytes": jpeg(i), "path": f"{i}.jpg"}, "caption": f"é {i}", "label": -i} for i in range(100)]
features = datasets.Features(image=datasets.Image(), caption=datasets.Value("string"), label=datasets.Value("int64"))
made = datasets.Dataset.from_list(rows, features=features)
if json.loads(sys.argv[2])["to"] == "disk":
    made.save_to_disk(sys.argv[1], num_shards=3)
else:
    data = Path(sys.argv[1], "data")
    data.mkdir(parents=True)
    for i in range(3):
        made.shard(3, i, contiguous=True).to_parquet(data / f"train-{i:05d}-of-00003.parquet")
    Path(sys.argv[1], "README.md").write_text("---\\n---\\n")
undecoded = made.cast_column("image", datasets.Image(decode=False))
print(json.dumps([[row["image"]["bytes"].hex(), row["caption"], row["label"]] for row in undecoded]))
"""

WEBDATASET = """
import webdataset
from pathlib import Path
Path(sys.argv[1]).mkdir()
with webdataset.ShardWriter(sys.argv[1] + "/%06d.tar", maxcount=16, verbose=0) as writer:
    for i in range(100):
        writer.write({"__key__": f"s{i:04d}", "jpg": jpeg(i), "json": {"label": -i}, "seg.png": b"x"})
shards = sorted(map(str, Path(sys.argv[1]).glob("*.tar")))
rows = webdataset.WebDataset(shards, shardshuffle=False)
print(json.dumps([[row["__key__"], row["jpg"].hex(), row["json"].decode()] for row in rows]))
"""


def written(program: str, folder: Path, packing: str) -> list[list[object]]:
    """Write a dataset with the library of a peer; gives what its own reader says is in it."""
    home = {**os.environ, "HOME": str(folder.parent), "PYTHONPATH": ""}
    script = folder.with_suffix(".py")  # a file, since processes of the peers import it
    script.write_text(ROWS + program)
    command = [PYTHON, "-W", "ignore", str(script), str(folder), packing]
    done = subprocess.run(command, env=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows: list[list[object]] = json.loads(done.stdout.splitlines()[-1])
    return rows


SETTINGS = Options(shard_samples=30, check_images=False)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))


def samples(source: Path, target: Path, *, reshard: bool = False, from_url: bool = False) -> list[sp.Sample]:
    report = run_conversion(source, target, SETTINGS, reshard=reshard)
    assert (report.samples, report.rejected) == (100, [])
    if from_url:
        with serving(source.parent) as server:
            assert run_conversion(f"{server.url}/{source.name}", target.with_name("there"), SETTINGS) == report
        assert written_files(target.with_name("there")) == written_files(target)
    return list(sp.TarShardReader(target, sp.Lane(), shuffle=False, epochs=1))


def array(sample: sp.Sample, name: str) -> object:
    import io

    return np.load(io.BytesIO(sample[name])).tolist()


@pytest.mark.parametrize(
    "packing", ["{}", *(json.dumps({"compression": name}) for name in ("zstd", "zstd:9", "gz:5", "bz2"))]
)
def test_mds_written_by_mosaic_streaming_is_converted(tmp_path: Path, packing: str) -> None:
    expected = written(MDS, tmp_path / "in", packing)
    for sample, (values, raw, vector, fixed, pixels, image, mask) in zip(
        samples(tmp_path / "in", tmp_path / "out", from_url=True), expected, strict=True
    ):
        assert sample.json() == values
        assert sample["raw.jpg"].hex() == raw
        assert (array(sample, "vector.npy"), array(sample, "npy")) == (vector, fixed)
        assert np.asarray(sample.image("jpg")).tolist() == image
        assert np.asarray(sample.image("png")).tolist() == mask
        assert np.asarray(sample.image("pixels.png")).tolist() == pixels


PACKINGS = [{}, *({"compression": "zstd", "compression_level": level} for level in ("chunk", "sample"))]


@pytest.mark.parametrize("packing", [json.dumps(packing) for packing in PACKINGS])
def test_chunks_written_by_litdata_are_converted(tmp_path: Path, packing: str) -> None:
    expected = written(LITDATA, tmp_path / "in", packing)
    for sample, (values, raw, vector, fixed, pixels, tensor) in zip(
        samples(tmp_path / "in", tmp_path / "out", from_url=True), expected, strict=True
    ):
        assert sample.json() == values
        assert sample["jpg"].hex() == raw
        assert [array(sample, name) for name in ("npy", "fixed.npy", "tensor.npy")] == [vector, fixed, tensor]
        assert np.asarray(sample.image("png")).tolist() == pixels


@pytest.mark.parametrize("packing", ["{}", '{"compression": "zstd"}'])
def test_rows_written_by_litdata_optimize_are_converted(tmp_path: Path, packing: str) -> None:
    expected = written(ROWS_OF_LITDATA, tmp_path / "in", packing)
    for sample, (values, image) in zip(
        samples(tmp_path / "in", tmp_path / "out", from_url=True), expected, strict=True
    ):
        assert (sample.json(), sample["jpg"].hex()) == (values, image)


@pytest.mark.parametrize("to", ["disk", "hub"])
def test_datasets_written_by_hf_datasets_are_converted(tmp_path: Path, to: str) -> None:
    expected = written(HUGGING_FACE, tmp_path / "in", json.dumps({"to": to}))
    for sample, (image, caption, label) in zip(samples(tmp_path / "in", tmp_path / "out"), expected, strict=True):
        assert sample["jpg"].hex() == image
        assert (sample["caption"].decode(), json.loads(sample["label"])) == (caption, label)


def test_tars_written_by_webdataset_are_converted(tmp_path: Path) -> None:
    expected = written(WEBDATASET, tmp_path / "in", "{}")
    found = samples(tmp_path / "in", tmp_path / "out", reshard=True)
    assert [[sample.key, sample["jpg"].hex(), sample["json"].decode()] for sample in found] == expected
    assert {sample["seg.png"] for sample in found} == {b"x"}

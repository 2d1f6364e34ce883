"""MDS's hashes in index.json: verified by `check`, by `convert`, and by a reader that is asked to."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import xxhash

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.tools.check.dataset_check import check_dataset
from tests.support.toy_records import write_captioned_litdata, write_captioned_mds

HASHES = {"sha1": lambda data: hashlib.sha1(data).hexdigest(), "xxh3_64": lambda data: xxhash.xxh3_64(data).hexdigest()}


def hashed(folder: Path, *algorithms: str) -> Path:
    """The folder with the hashes of its files in index.json; one that is not known here too."""
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        for info in (shard["raw_data"], shard["zip_data"]):
            if info is not None and (path := folder / info["basename"]).exists():
                info["hashes"] = {"ours": "0", **{name: HASHES[name](path.read_bytes()) for name in algorithms}}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def change_caption(folder: Path, name: str) -> None:
    """Another value in the second shard, of the same length."""
    data = (folder / name).read_bytes()
    assert data.count(b"no. 5") == 1
    (folder / name).write_bytes(data.replace(b"no. 5", b"no. 6"))


def test_hash_equals_that_of_another_program(tmp_path: Path) -> None:
    folder = hashed(write_captioned_mds(tmp_path / "mds"), "sha1")
    path = folder / "shard.00001.mds"
    said = json.loads((folder / "index.json").read_text())["shards"][1]["raw_data"]["hashes"]["sha1"]
    assert subprocess.run(["sha1sum", path], capture_output=True, text=True, check=True).stdout.split()[0] == said


@pytest.mark.parametrize("algorithm", HASHES)
def test_a_changed_value_is_found_by_check_and_convert_and_by_a_reader_that_validates(
    tmp_path: Path, algorithm: str
) -> None:
    right = hashed(write_captioned_mds(tmp_path / "right"), algorithm)
    assert not check_dataset(str(right)).problems
    assert len(list(custom.MdsReader(right, sp.Lane(), epochs=1, validate_hash=algorithm))) == 10
    folder = hashed(write_captioned_mds(tmp_path / "mds"), algorithm)
    change_caption(folder, "shard.00001.mds")  # before it is indexed
    (problem,) = check_dataset(str(folder)).problems
    assert (problem.reason, problem.shard) == ("wrong hash", "shard.00001.mds")
    assert f"its {algorithm} is " in problem.detail
    with pytest.raises(ValueError, match=rf"shard\.00001\.mds: damaged: its {algorithm} is .*, index\.json says "):
        sp.convert(folder, tmp_path / "out")
    reader = custom.MdsReader(folder, sp.Lane(), epochs=1, shuffle=False, validate_hash=algorithm)
    with pytest.raises(sp.ShardError, match=rf"shard\.00001\.mds: damaged: its {algorithm} is "):
        [sample.json() for sample in reader]
    skipping = custom.MdsReader(folder, sp.Lane(), epochs=1, shuffle=False, validate_hash=algorithm, on_error="skip")
    captions = [item["json"]["caption"] for item in sp.Encode(skipping, sp.Decoded(), on_error="skip")]
    assert captions == [f"no. {i}" for i in (0, 1, 2, 3, 8, 9)]
    unasked = custom.MdsReader(folder, sp.Lane(), epochs=1, shuffle=False)
    assert [sample.json()["caption"] for sample in unasked][5] == "no. 6"  # as Mosaic's


def test_a_compressed_shard_has_the_hash_of_the_compressed_file(tmp_path: Path) -> None:
    folder = hashed(write_captioned_mds(tmp_path / "mds", packed="zstd"), "sha1")
    assert sp.convert(folder, tmp_path / "right").samples == 10
    assert len(list(custom.MdsReader(folder, sp.Lane(), epochs=1, validate_hash="sha1"))) == 10
    assert not check_dataset(str(folder)).problems
    index = (folder / "index.json").read_text()
    said = json.loads(index)["shards"][2]["zip_data"]["hashes"]["sha1"]
    (folder / "index.json").write_text(index.replace(said, "0" * 40))
    (problem,) = check_dataset(str(folder)).problems
    assert problem.shard == "shard.00002.mds.zstd" and "0" * 40 in problem.detail


def test_unknown_hash_is_a_setting_error_and_a_missing_one_a_data_error(tmp_path: Path) -> None:
    folder = hashed(write_captioned_mds(tmp_path / "mds"))
    assert not check_dataset(str(folder)).problems
    with pytest.raises(ValueError, match="validate_hash must be an algorithm of hashlib or xxhash, not 'ours'"):
        custom.MdsReader(folder, sp.Lane(), validate_hash="ours")
    with pytest.raises(sp.ShardError, match=r"index\.json has no sha256 of it, but ours"):
        next(custom.MdsReader(folder, sp.Lane(), validate_hash="sha256")).json()


def test_dataset_without_hashes_is_read(tmp_path: Path) -> None:
    folder = write_captioned_litdata(tmp_path / "litdata")
    assert not check_dataset(str(folder)).problems
    assert open_any(folder).count == 10

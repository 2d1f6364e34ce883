"""`savable_pipeline.tools.convert`: what is written, who can read it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.manifest import VERSION
from savable_pipeline.tools.convert.options import MANIFEST
from tests.support.toy_files import SMALL, file_hashes, tar_files, write_captioned_images, write_lines


def test_a_folder_becomes_shards_of_its_samples_sorted_by_key(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 4, **{"b/001.seg.PNG.txt": b"mask"})
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert (report.samples, report.shards, report.rejected) == (4, 2, [])
    names = ["000.jpg", "000.txt", "003.jpg", "003.txt", "b/001.jpg", "b/001.seg.PNG.txt", "b/001.txt"]
    files = tar_files(tmp_path / "out")
    assert list(files) == [*names, "b/c.d/002.jpg", "b/c.d/002.txt"]
    assert all(content == (source / name).read_bytes() for name, content in files.items())


def test_a_jsonl_line_is_a_sample_with_the_files_it_names(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "in", 3)
    lines = [b'{"image": "000.jpg",  "text": "\xc3\xa9"}', b"", {"image": ["b/001.jpg", "000.jpg"]}, {"x": 1}]
    source = write_lines(tmp_path / "in/meta.jsonl", *lines)
    report = run_conversion(source, tmp_path / "out", SMALL)
    assert (report.samples, report.rejected) == (3, [])
    files = tar_files(tmp_path / "out")
    assert list(files) == [
        *("000000001.jpg", "000000001.json"),
        *("000000002.0.jpg", "000000002.1.jpg", "000000002.json"),
        "000000003.json",
    ]
    assert files["000000001.json"] == lines[0]
    assert files["000000002.1.jpg"] == (tmp_path / "in/000.jpg").read_bytes()


def test_jsonl_fields_name_keys_files_and_parts_by_option(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "pictures", 2)
    source = write_lines(tmp_path / "meta.jsonl", {"id": "z/1", "a": "000.jpg", "m": "b/001.jpg"}, {"id": 7})
    options = Options(key_field="id", file_fields=("a", "m=mask"))
    run_conversion(source, tmp_path / "out", options, files_from=tmp_path / "pictures")
    assert list(tar_files(tmp_path / "out")) == ["z/1.jpg", "z/1.json", "z/1.mask.jpg", "7.json"]


def test_a_jsonl_with_a_byte_order_mark_and_no_last_newline_is_read_whole(tmp_path: Path) -> None:
    source = tmp_path / "meta.jsonl"
    source.write_bytes(b'\xef\xbb\xbf  {"a": 1}\r\n{"a": 2}')
    run_conversion(source, tmp_path / "out", SMALL)
    assert list(tar_files(tmp_path / "out").values()) == [b'{"a": 1}', b'{"a": 2}']


@pytest.mark.parametrize("shard_bytes", [1, 20_480, 30_720])
def test_shard_size_is_limited(tmp_path: Path, shard_bytes: int) -> None:
    long_names = {f"{i:0200d}.txt": b"x" for i in range(30)}  # each takes two more blocks of headers
    run_conversion(
        write_captioned_images(tmp_path / "in", 30, **long_names), tmp_path / "out", Options(shard_bytes=shard_bytes)
    )
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert max(sizes) == max(shard_bytes, 10_240)
    assert len(sizes) == 60 if shard_bytes == 1 else len(sizes) < 12


def test_long_and_non_ascii_names_round_trip(tmp_path: Path) -> None:
    names = ["é/ü.txt", f"{'n' * 200}.txt", f"{'d' * 120}/{'e' * 120}/x.txt"]
    source = write_captioned_images(tmp_path / "in", 0, **{name: name.encode() for name in names})
    run_conversion(source, tmp_path / "out", SMALL)
    assert {name: content.decode() for name, content in tar_files(tmp_path / "out").items()} == dict(
        zip(names, names, strict=True)
    )


def test_index_equals_that_of_a_scan(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 10), tmp_path / "out", SMALL)
    written = file_hashes(tmp_path / "out")
    shutil.rmtree(tmp_path / "out/.nv-meta")
    for path in (tmp_path / "out").glob("*.idx"):
        path.unlink()
    assert index_files(tmp_path / "out", TARS)[0].exists()
    made = {name: hashed for name, hashed in file_hashes(tmp_path / "out").items() if not name.endswith(".lock")}
    assert made == {name: written[name] for name in made}
    assert len(made) == 4 + 4 + 1


def test_webdataset_reads_converted_shards(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    source = write_captioned_images(tmp_path / "in", 7)
    run_conversion(source, tmp_path / "out", SMALL)
    shards = [str(path) for path in sorted((tmp_path / "out").glob("*.tar"))]
    read = {item["__key__"]: item for item in wds.WebDataset(shards, shardshuffle=False)}
    assert sorted(read) == sorted(str(p.relative_to(source))[:-4] for p in source.rglob("*.jpg"))
    assert all(read[key]["jpg"] == (source / f"{key}.jpg").read_bytes() for key in read)


def test_energon_loads_converted_shards(tmp_path: Path) -> None:
    energon = pytest.importorskip("megatron.energon")
    lines = [{"image": f"{('', 'b/', 'b/c.d/')[i % 3]}{i:03d}.jpg", "caption": f"no. {i}"} for i in range(7)]
    write_captioned_images(tmp_path / "in", 7)
    run_conversion(tmp_path / "in", tmp_path / "folder", SMALL)
    run_conversion(write_lines(tmp_path / "in/meta.jsonl", *lines), tmp_path / "jsonl", SMALL)
    for target, expected in (("folder", "caption of "), ("jsonl", "no. ")):
        config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        settings = {"batch_size": 1, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
        data = energon.get_train_dataset(tmp_path / target, worker_config=config, repeat=False, **settings)
        captions = [batch.caption[0] for batch in energon.get_loader(data)]
        assert len(captions) == 7 and all(caption.startswith(expected) for caption in captions)


def test_the_sample_offsets_equal_those_of_energon_byte_for_byte(tmp_path: Path) -> None:
    prepare = pytest.importorskip("megatron.energon.flavors.webdataset.prepare").WebdatasetPreparator
    path_type = pytest.importorskip("megatron.energon.epathlib").EPath
    run_conversion(write_captioned_images(tmp_path / "in", 8, **{f"é{'n' * 150}.txt": b"x"}), tmp_path / "out", SMALL)
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.tar.idx")}
    for path in before:
        path.unlink()
        name = path.name.removesuffix(".idx")
        list(prepare._preprocess_tar(name, {name: 0}, path_type(tmp_path / "out"), 50))
    assert len(before) == 3 and all(path.read_bytes() == offsets for path, offsets in before.items())


def test_samples_without_an_energon_type_use_a_cooker(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 1, **{"a.raw": b"x"}), tmp_path / "out", SMALL)
    assert "CrudeWebdataset" in (tmp_path / "out/.nv-meta/dataset.yaml").read_text()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("", Options(shard_samples=2), "shard_samples: 3 there, 2 here"),
        ("", Options(shard_samples=3, check_images=False), "check_images: True there, False here"),
        ("000.txt", SMALL, "input: other files"),
        ("new.txt", SMALL, "samples: 4 there, 5 here"),
    ],
)
def test_another_conversion_into_the_same_folder_is_rejected(
    tmp_path: Path, change: str, options: Options, message: str
) -> None:
    source = write_captioned_images(tmp_path / "in", 4)
    run_conversion(source, tmp_path / "out", SMALL)
    before = file_hashes(tmp_path / "out")
    if change:
        (source / change).write_text("other words")
    with pytest.raises(SavableError, match=message):
        run_conversion(source, tmp_path / "out", options)
    assert file_hashes(tmp_path / "out") == before


def test_manifest_of_another_version_is_rejected_with_a_fix(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2)
    run_conversion(source, tmp_path / "out", SMALL)
    path = tmp_path / "out" / MANIFEST
    found = json.loads(path.read_text())
    for manifest in ({**found, "version": VERSION - 1}, {**found, "version": VERSION + 1}):
        path.write_text(json.dumps(manifest))
        with pytest.raises(
            SavableError, match=rf"{path}: not a manifest of this version: .*\. Convert into another folder"
        ):
            run_conversion(source, tmp_path / "out", SMALL)


def test_folder_with_foreign_shards_is_rejected_and_unchanged(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 4)
    (tmp_path / "out/deep").mkdir(parents=True)
    (tmp_path / "out/deep/x.tar").write_bytes(b"")
    with pytest.raises(SavableError, match=r"x\.tar of another origin"):
        run_conversion(source, tmp_path / "out", SMALL)
    assert list(file_hashes(tmp_path / "out")) == ["deep/x.tar"]


@pytest.mark.parametrize(
    ("source", "target", "options", "message"),
    [
        ("nowhere", "out", {}, "no such file or folder"),
        ("in/000.jpg", "out", {}, "raw files are read as one folder"),
        ("empty", "out", {}, "has no samples"),
        ("in", "in/out", {}, "must not contain each other"),
        ("in/b", "in", {}, "must not contain each other"),
        ("in", "in/000.txt", {}, "must not contain each other"),
        ("in", "file", {}, "is a file"),
        ("in", "out", {"key_field": "id"}, "key= does not apply to folder files"),
    ],
)
def test_impossible_source_or_target_is_an_error(
    tmp_path: Path, source: str, target: str, options: dict[str, Any], message: str
) -> None:
    write_captioned_images(tmp_path / "in", 4)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=message):
        run_conversion(tmp_path / source, tmp_path / target, Options(**options))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"shard_bytes": 0}, {"shard_samples": 0}])
def test_shard_size_of_zero_is_an_error(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        Options(**options)  # type: ignore[arg-type]


def test_a_file_that_changes_after_the_plan_was_made_is_an_error(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 4)
    with pytest.raises(SavableError, match="it changed during the conversion"):
        run_conversion(source, tmp_path / "out", SMALL, progress=lambda *_: (source / "000.txt").write_bytes(b"no"))

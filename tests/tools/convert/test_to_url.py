"""Conversion into a bucket of an S3 server: its objects are the files that a folder would have, after any kill."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline.data.remote.session import Bucket, close_buckets
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import Options, run_conversion
from savable_pipeline.tools.convert.options import WORK
from savable_pipeline.tools.convert.target import target_at
from tests.conftest import write_tar
from tests.project.pages import ROOT, blocks_of, run_blocks, write_files
from tests.support.processes import run_until_killed
from tests.support.real_servers import bucket_of
from tests.support.toy_engine import ToyEngine
from tests.support.toy_files import SMALL, file_hashes, jpeg, write_captioned_images
from tests.support.toy_sources import HALVES, ONE_A_READER, SOURCES, packed_tars

URL = "s3://data/out"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch, bucket_of(tmp_path_factory.mktemp("nothing"), patch) as found:
        yield found


@pytest.fixture
def bucket(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_RETRY_S", "5")
    server.objects.all().delete()  # those of another test
    return server


def objects(bucket: Any, prefix: str = "out/") -> dict[str, str]:
    """The hash of every object below a prefix, as `file_hashes` has those of files."""
    found = {each.key: each.get()["Body"].read() for each in bucket.objects.filter(Prefix=prefix)}
    return {key.removeprefix(prefix): hashlib.sha256(data).hexdigest() for key, data in sorted(found.items())}


def repacked(folder: Path) -> dict[str, str]:
    """The snapshot of re-packed tars, but for the lock of an index that processes on a disk share."""
    return {name: found for name, found in file_hashes(folder).items() if not name.endswith(".lock")}


def left_behind(folder: Path) -> list[Path]:
    return [path for path in (folder / "cache").rglob("*") if "convert-" in str(path)]


SHORT = ("folder", "tars")


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.long) for k in ONE_A_READER])
def test_objects_in_a_bucket_equal_the_files_in_a_folder(tmp_path: Path, bucket: Any, kind: str) -> None:
    source = ONE_A_READER[kind](tmp_path / "in")
    reshard = "tars" in source.name
    local = run_conversion(source, tmp_path / "out", HALVES, reshard=reshard)
    assert run_conversion(source, URL, HALVES, reshard=reshard, workers=1) == local
    assert objects(bucket) == file_hashes(tmp_path / "out")
    assert not left_behind(tmp_path)


def test_class_names_are_next_to_the_shards(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(
        tmp_path / "in", 0, **{f"{name}/{i}.jpg": jpeg(i) for name in ("a", "b") for i in range(4)}
    )
    options = Options(shard_samples=3, classes=True)
    local = run_conversion(source, tmp_path / "out", options)
    assert run_conversion(source, URL, options, engine=ToyEngine(tmp_path / "elsewhere")) == local
    assert objects(bucket) == file_hashes(tmp_path / "out")
    assert (tmp_path / "out/classes.json").read_bytes() == b'["a", "b"]'


def test_processes_and_other_machines_write_the_same_objects(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 20, **{"003.jpg": b"bad", "nodot": b""})
    local = run_conversion(source, tmp_path / "out", SMALL)
    assert run_conversion(source, URL, SMALL, workers=2) == local
    assert objects(bucket) == file_hashes(tmp_path / "out")
    assert run_conversion(source, "s3://data/far", SMALL, engine=ToyEngine(tmp_path / "elsewhere")) == local
    assert objects(bucket, "far/") == file_hashes(tmp_path / "out")


def test_large_shard_is_uploaded_in_parts(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 0, **{f"{i}.raw": os.urandom(3_500_000) for i in range(5)})
    run_conversion(source, tmp_path / "out", Options())
    run_conversion(source, URL, Options())
    assert objects(bucket) == file_hashes(tmp_path / "out")
    Bucket(URL).upload(
        "uploaded", tmp_path / "out/000000.tar"
    )  # shards are copied after that, which merges their parts
    assert bucket.Object("out/uploaded").e_tag.endswith('-2"')  # the server's mark of an object of two parts
    bucket.Object("out/uploaded").delete()
    reader = sp.TarShardReader(f"{URL}/", sp.Lane(), shuffle=False, epochs=1)
    assert [bytes(sample["raw"]) for sample in reader] == [(source / f"{i}.raw").read_bytes() for i in range(5)]


@pytest.mark.parametrize(
    ("engine", "moments"),
    [
        (False, [40]),
        pytest.param(True, [60], marks=pytest.mark.long),
        pytest.param(False, range(8, 100, 9), marks=pytest.mark.long),
        pytest.param(True, range(8, 100, 9), marks=pytest.mark.long),
    ],
)
def test_killed_upload_resumes_from_another_machine(
    tmp_path: Path, bucket: Any, engine: bool, moments: Sequence[int]
) -> None:
    source = write_captioned_images(tmp_path / "in", 7, **{"003.jpg": b"bad", "nodot": b""})
    run_conversion(source, tmp_path / "out", SMALL)
    expected = file_hashes(tmp_path / "out")
    killed = 0

    def work() -> None:
        far = ToyEngine(tmp_path / "elsewhere") if engine else None
        run_conversion(source, URL, SMALL, workers=1, engine=far)

    for moment in moments:
        killed += run_until_killed(work, tmp_path, moment)
        names = {name for name in objects(bucket) if name.endswith(".tar") and not name.startswith(f"{WORK}/")}
        there = {name: found for name, found in objects(bucket).items() if name in names}
        assert there.items() <= expected.items(), "what is seen of a shard is whole"
        shutil.rmtree(tmp_path / "cache")
        work()
        assert objects(bucket) == expected, moment
        bucket.objects.all().delete()
    assert killed > len(moments) // 2


def test_finished_upload_is_rejected_and_unchanged(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 7)
    run_conversion(source, URL, SMALL)
    times = {each.key: each.last_modified for each in bucket.objects.all()}
    with pytest.raises(SavableError, match=r"^s3://data/out has this whole conversion"):
        run_conversion(source, URL, SMALL)
    assert {each.key: each.last_modified for each in bucket.objects.all()} == times


def stopped(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that ends once all shards are in the bucket, and some of the metadata."""
    uploaded = Bucket.upload

    def upload(bucket: Bucket, name: str, path: Path) -> None:
        if name.endswith("split.yaml"):
            raise KeyboardInterrupt
        uploaded(bucket, name, path)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Bucket, "upload", upload)
        run_conversion(source, URL, SMALL)


def test_interrupted_upload_restarts_with_the_current_source(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_captioned_images(tmp_path / "in", 7)
    stopped(source, monkeypatch)
    bucket.put_object(Key="out/below/000000.tar", Body=b"of another dataset")
    for path in (source / "b").rglob("*.jpg"):  # at equal size; of all shards but the first no sample is left
        path.write_bytes(bytes(path.stat().st_size))
    assert "out/000001.tar" in [each.key for each in bucket.objects.all()]
    local = run_conversion(source, tmp_path / "out", SMALL)
    assert run_conversion(source, URL, SMALL) == local
    found = objects(bucket)
    assert found.pop("below/000000.tar") and "000001.tar" not in found
    assert found == file_hashes(tmp_path / "out")


def test_reader_of_an_interrupted_upload_warns(
    tmp_path: Path, bucket: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_captioned_images(tmp_path / "in", 7)
    stopped(source, monkeypatch)
    bucket.Object("out/.nv-meta/savable.index").delete()  # as before the metadata
    sp.open_dataset(f"{URL}/")
    assert f"{URL}: samples are missing: the conversion of {source} was stopped" in caplog.text
    caplog.clear()
    run_conversion(source, URL, SMALL)
    assert len(sp.open_dataset(f"{URL}/")) == 7
    assert "missing" not in caplog.text


def test_other_shards_and_other_options_are_rejected_by_the_name_of_the_url(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 4)
    bucket.put_object(Key="other/a.tar", Body=b"a tar")
    with pytest.raises(SavableError, match=r"^s3://data/other has a\.tar of another origin"):
        run_conversion(source, "s3://data/other/", SMALL)
    run_conversion(source, URL, SMALL)
    with pytest.raises(SavableError, match=r"^s3://data/out has another conversion.*\nshard_samples: 3 there, 4 here"):
        run_conversion(source, URL, Options(shard_samples=4))
    assert [each.key for each in bucket.objects.filter(Prefix="other/")] == ["other/a.tar"]


@pytest.mark.parametrize(
    "kind", ["jsonl.gz", *(pytest.param(k, marks=pytest.mark.long) for k in ("tsv.gz", "array.xz"))]
)
def test_machines_convert_compressed_records_into_a_bucket(tmp_path: Path, bucket: Any, kind: str) -> None:
    source = SOURCES[kind](tmp_path / "in")
    local = run_conversion(source, tmp_path / "out", HALVES)
    assert run_conversion(source, URL, HALVES, engine=ToyEngine(tmp_path / "elsewhere")) == local
    assert objects(bucket) == file_hashes(tmp_path / "out")
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("far", [pytest.param(False, marks=pytest.mark.long), True])
def test_compressed_tars_are_repacked_into_a_bucket(tmp_path: Path, bucket: Any, far: bool) -> None:
    source = packed_tars(tmp_path / "in")
    below = source / "below" / "b.tar.gz"
    write_tar(tmp_path / "b.tar", [("b.txt", b"some text")])
    below.parent.mkdir()
    below.write_bytes(gzip.compress((tmp_path / "b.tar").read_bytes(), 0))
    (source / "bad.tar.gz").write_bytes(b"not compressed")
    engine = ToyEngine(tmp_path / "elsewhere") if far else None
    local = run_conversion(source, tmp_path / "out", Options())
    assert run_conversion(source, URL, Options(), engine=engine) == local
    assert objects(bucket) == repacked(tmp_path / "out")
    with pytest.raises(SavableError, match=r"^s3://data/out has this whole conversion"):
        run_conversion(source, URL, Options(), engine=engine)
    assert objects(bucket) == repacked(tmp_path / "out")
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("moments", [pytest.param([40, *range(8, 100, 9)], marks=pytest.mark.long)])
def test_killed_repack_into_a_bucket_resumes(tmp_path: Path, bucket: Any, moments: Sequence[int]) -> None:
    source = packed_tars(tmp_path / "in")
    run_conversion(source, tmp_path / "out", Options())
    expected, killed = repacked(tmp_path / "out"), 0
    for moment in moments:
        if not run_until_killed(lambda: run_conversion(source, URL, Options()), tmp_path, moment):
            bucket.objects.all().delete()
            continue
        killed += 1
        names = {name for name in objects(bucket) if name.endswith(".tar") and not name.startswith(f"{WORK}/")}
        there = {name: found for name, found in objects(bucket).items() if name in names}
        assert there.items() <= expected.items(), "what is seen of a shard is whole"
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        run_conversion(source, URL, Options())
        assert objects(bucket) == expected, moment
        bucket.objects.all().delete()
    assert killed > 3


def test_two_conversions_at_once_into_one_url_are_rejected(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 4)
    with (
        target_at(URL),
        pytest.raises(SavableError, match=r"^s3://data/out: another conversion is writing there; wait"),
    ):
        run_conversion(source, URL, SMALL)
    run_conversion(source, URL, SMALL)
    assert len(objects(bucket)) > 4


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.com/out", "unsupported target. Use a folder, or s3://, gs://, az://"),
        ("s3://", "unsupported target"),
        ("s3://nowhere/out", "nowhere"),
    ],
)
@pytest.mark.usefixtures("bucket")
def test_unwritable_url_is_one_line(tmp_path: Path, url: str, words: str) -> None:
    result = CliRunner().invoke(app, ["convert", str(write_captioned_images(tmp_path / "in", 1)), url])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_path_is_not_treated_as_a_url(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a Path cannot hold a URL"):
        run_conversion(write_captioned_images(tmp_path / "in", 1), Path("s3://data/out"), SMALL)


def test_the_command_writes_to_a_url(tmp_path: Path, bucket: Any) -> None:
    source = write_captioned_images(tmp_path / "in", 4, nodot=b"")
    result = CliRunner().invoke(app, ["convert", str(source), f"{URL}/", "--shard-samples", "3", "--skip-bad"])
    assert result.exit_code == 0, result.output
    assert "4 samples in 2 shards" in result.output
    assert "all of them: s3://data/out/.nv-meta/savable.rejected.jsonl" in result.output
    run_conversion(source, tmp_path / "out", SMALL)
    assert objects(bucket) == file_hashes(tmp_path / "out")


@pytest.mark.usefixtures("bucket")
def test_docs_page_matches_the_output_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = [block for block in blocks_of(ROOT / "docs/convert-remote.md") if "test_to_url" in (block.why or "")]
    run_blocks(blocks, {})
    assert len(blocks) == 1


def test_objects_are_downloaded_written_and_removed(tmp_path: Path, bucket: Any) -> None:
    below = Bucket("s3://data/some")
    (tmp_path / "a").write_bytes(b"one")
    below.upload("x/a", tmp_path / "a")
    (tmp_path / "a").write_bytes(b"another")
    below.upload("x/a", tmp_path / "a")
    found = below.listing()
    below.fetch(found, tmp_path / "got")
    below.erase(["x/a", "not there"])
    left = below.listing()
    close_buckets()
    assert [(each.name, each.size) for each in found] == [("x/a", 7)]
    assert (tmp_path / "got/x/a").read_bytes() == b"another"
    assert not left

"""A layout behind a URL gives the samples that it gives in a folder, or an error that says why it cannot.

A bucket is named by a prefix, a glob or its objects, a dataset of the Hub by its name, and a web server by the
addresses of files or by a folder with a marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.data.remote.session import Session, close_scratch
from savable_pipeline.data.shards import paths
from savable_pipeline.data.shards.paths import list_files
from savable_pipeline.data.stores import formats
from savable_pipeline.data.stores.opening import find_source, index_any
from tests.data.test_layouts import LAYOUTS, Layout, common_voice
from tests.support.toy_hub import ToyHub, local_hub
from tests.support.toy_records import write_captioned_mds
from tests.support.toy_server import ToyServer, serving, use_as_s3

# What is read from disks alone.
RAW = r"raw files are read from disks alone\. Copy them to a disk"
NAMING = r"names '[^']*', but files of remote tables are not read\. Copy them"
ALL = [pytest.param(each, id=each.name) for each in LAYOUTS]
SOME = [  # a third of them; `pytest -m long` runs the others
    each if number % 3 == 0 else pytest.param(*each.values, id=each.id, marks=pytest.mark.long)
    for number, each in enumerate(ALL)
]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    folder = tmp_path_factory.mktemp("www")
    patch.setenv("SAVABLE_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    patch.setenv("SAVABLE_RETRY_S", "2")
    with serving(folder) as server:
        use_as_s3(server, patch)
        downloader = Session.of().connected()  # of all tests here
        yield server
        downloader.close()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, server: ToyServer, patch: pytest.MonkeyPatch) -> Iterator[ToyHub]:
    with local_hub(tmp_path_factory.mktemp("hub"), patch) as hub:
        downloader = Session.of().connected()
        yield hub
        downloader.close()
    close_scratch()


@pytest.fixture
def bucket(server: ToyServer, tmp_path: Path) -> Iterator[Path]:
    """A new bucket, with a folder."""
    path = server.folder / tmp_path.name.replace("_", "-")
    (path / "data").mkdir(parents=True)
    yield path


def found(files: Any) -> Any:
    """The keys and parts of all samples, or the error without the address that it begins with."""
    try:
        return [(sample.key, {name: sample[name] for name in sample}) for sample in sp.open_dataset(files)]
    except (sp.ShardError, ValueError) as error:
        return re.sub(
            r"^(?:\w+://|/)\S*: ", "", str(error).replace("object has this prefix", "file in this folder or below it")
        )


def check_equal(remote: Any, local: Any) -> None:
    if remote != local:
        assert isinstance(remote, str), (remote, local)
        assert re.search(f"{RAW}|{NAMING}", remote), (remote, local)


@pytest.mark.parametrize("layout", ALL)
def test_bucket_has_the_same_samples_as_the_folder(layout: Layout, bucket: Path) -> None:
    layout.write(folder := bucket / "data")
    url = f"s3://{bucket.name}"
    remote = [found(f"{url}/data/"), found(f"{url}/data/**"), found(f"{url}/d*")]
    local = [found(folder), found(f"{folder}/**"), found(f"{bucket}/d*")]
    for there, here in zip(remote, local, strict=True):
        check_equal(there, here)
    check_equal(found(url + "/data"), local[0])  # as the folder was indexed on a disk


@pytest.mark.parametrize("layout", SOME)
def test_objects_and_web_addresses_have_the_same_samples_as_files(
    layout: Layout, bucket: Path, server: ToyServer
) -> None:
    layout.write(folder := bucket / "data")
    listed = find_source(folder).listed if not layout.error else list_files(folder)
    names = [] if listed is None else listed.chosen or listed.names
    remote = [found([f"{root}/{bucket.name}/data/{name}" for name in names]) for root in ("s3:/", server.url)]
    local = found([folder / name for name in names])
    for there in remote:
        if layout.kind == "csv" and re.search("jpg|mp3", str(local)):  # columns name files if there are such files
            assert re.search(NAMING, there)
        else:
            check_equal(there, local)


def test_several_tables_of_the_same_clips_are_named_and_each_opens_alone(
    bucket: Path, hub: ToyHub, tmp_path: Path
) -> None:
    for folder in (bucket / "data/en", tmp_path / "repo/en"):
        folder.mkdir(parents=True)
        common_voice("dev", "test", "train", "validated")(folder)
    hub.commit(tmp_path / "repo")
    for root in (f"s3://{bucket.name}/data", f"s3://{bucket.name}/data/en/**", "hf://datasets/org/name"):
        with pytest.raises(
            sp.ShardError, match=r"one of them: (\S*)dev\.tsv, \1test\.tsv, \1train\.tsv, \1validated\.tsv$"
        ):
            sp.open_dataset(root)
    for root in (f"s3://{bucket.name}/data/en", "hf://datasets/org/name/en"):
        rows = [sample.json() for sample in sp.open_dataset(f"{root}/train.tsv")]
        assert [row["sentence"] for row in rows] == ["Hello 0", "Hello 1", "Hello 2"]


def test_an_index_of_another_program_that_is_too_large_is_an_error(
    bucket: Path, server: ToyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_captioned_mds(folder := bucket / "data", 5)
    for module in (formats, paths):
        monkeypatch.setattr(module, "LARGEST_INDEX", 100)
    for files in (folder, f"s3://{bucket.name}/data/", f"{server.url}/{bucket.name}/data/"):
        with pytest.raises(sp.ShardError, match=r"data/index\.json: [\d,]+ bytes, but an index has at most 100"):
            sp.open_dataset(files)


# Web servers cannot be listed: a folder of one opens if a file of this name says what is in it.
MARKED = ("MDS of Mosaic Streaming", "LitData", "saved by HF datasets", "LeRobot, version 2.1")


@pytest.mark.parametrize("layout", SOME)
def test_a_web_folder_opens_by_a_marker_or_an_index(layout: Layout, bucket: Path, server: ToyServer) -> None:
    layout.write(folder := bucket / "data")
    url = f"{server.url}/{bucket.name}/data/"
    before, local = found(url), found(folder)
    if layout.name in MARKED:
        check_equal(before, local)
    else:
        assert re.search(r"web servers cannot be listed\. Name the shards, as in .*, or upload the index", before), (
            before
        )
    if layout.kind and layout.kind != "folder":
        index_any(folder, processes=1)
    index = (folder / ".nv-meta" / f"savable.{layout.kind}.index").exists() or layout.kind == "tar"
    if index and layout.kind != "folder":
        names = re.search("jpg|wav|mp3", str(local)) and layout.kind in ("csv", "jsonl", "json", "parquet")
        # Nothing says there that files are beside the tables.
        check_equal(found(url), found([f"{url}{each}" for each in entries(folder)]) if names else local)


def entries(folder: Path) -> list[str]:
    return [entry.name for entry in sp.open_dataset(folder).dataset.entries]


@pytest.mark.parametrize("layout", SOME)
def test_hub_dataset_has_the_same_samples_as_the_folder(layout: Layout, tmp_path: Path, hub: ToyHub) -> None:
    (folder := tmp_path / "repo" / "data").mkdir(parents=True)
    layout.write(folder)
    hub.commit(folder)
    remote = found("hf://datasets/org/name")
    if isinstance(remote, str) and "splits or configurations" in remote:
        return
    check_equal(remote, found(folder))

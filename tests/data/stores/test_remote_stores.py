"""Parquet, Arrow, JSONL and token files behind a URL give the batches that they give from a disk."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores import jsonl
from savable_pipeline.data.stores.cached_blocks import CachedBlocks
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.data.stores.opening import find_source
from tests.support.toy_remote_stores import KINDS, LISTED, PAD, READERS, SIZES, WRITERS, ids_pipeline, names_of, urls_of
from tests.support.toy_server import ToyServer, serving, use_as_s3

STEPS = 40


def kinds(*few: str) -> pytest.MarkDecorator:
    """A few kinds of files; the others in a long search."""
    others = [pytest.param(kind, marks=pytest.mark.long) for kind in KINDS if kind not in few]
    return pytest.mark.parametrize("kind", [*few, *others])


@pytest.fixture
def www(tmp_path: Path) -> Path:
    for kind, write in WRITERS.items():
        (tmp_path / "www" / kind).mkdir(parents=True)
        write(tmp_path / "www" / kind)
    return tmp_path / "www"


@pytest.fixture
def server(www: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    with serving(www) as server:
        yield server


def loader_of(
    kind: str, files: Any, *, num_workers: int = 0, method: str | None = None, **settings: Any
) -> sp.SavableLoader:
    pipeline = functools.partial(ids_pipeline, kind, files, **settings)
    return sp.SavableLoader(pipeline, seed=5, lanes=6, num_workers=num_workers, workers=sp.Workers(start_method=method))


def batches(loader: sp.SavableLoader, steps: int = STEPS) -> list[Any]:
    return [batch for _, batch in zip(range(steps), loader, strict=False)]


def local(www: Path, kind: str, **settings: Any) -> list[Any]:
    with loader_of(kind, str(www / kind), **settings) as loader:
        return batches(loader)


def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that holds a part of the files, of which as little is read at a time."""
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", "40000")
    monkeypatch.setattr(jsonl, "_CHUNK", 4096)


def samples(kind: str, files: Any, **settings: Any) -> list[tuple[str, dict[str, bytes]]]:
    """Key and parts of every sample of an epoch."""
    reader = READERS[kind](files, sp.Lane(seed=3), epochs=1, **settings)
    return [(sample.key, {part: sample[part] for part in sample}) for sample in reader]


def bytes_of(www: Path, kind: str) -> int:
    return sum((www / kind / name).stat().st_size for name in names_of(kind))


def sent(server: ToyServer, kind: str) -> int:
    return sum(server.sent(f"/{kind}/{name}") for name in names_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_remote_samples_equal_local_ones_and_each_byte_is_downloaded_once(
    server: ToyServer, www: Path, kind: str
) -> None:
    there = samples(kind, urls_of(server.url, kind))
    assert there == samples(kind, str(www / kind))
    assert len(there) == sum(SIZES)
    assert sent(server, kind) <= bytes_of(www, kind)
    assert samples(kind, urls_of(server.url, kind)) == there  # of the cache
    assert sent(server, kind) <= bytes_of(www, kind)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("parquet", "fork"),
        ("mds", "forkserver"),
        *(pytest.param(each, "spawn", marks=pytest.mark.long) for each in KINDS),
    ],
)
def test_workers_read_the_same_as_from_disk_also_after_the_trainer_has_read(
    server: ToyServer, www: Path, kind: str, method: str
) -> None:
    expected = local(www, kind)
    urls = urls_of(server.url, kind)
    with loader_of(kind, urls) as loader:
        assert batches(loader, 3) == expected[:3]
        with loader_of(kind, urls, num_workers=2, method=method) as workers:
            assert batches(workers) == expected
    assert sent(server, kind) <= bytes_of(www, kind)


@kinds("arrow", "jsonl", "litdata")
def test_partial_cache_changes_nothing(
    server: ToyServer, www: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache(monkeypatch)
    with loader_of(kind, urls_of(server.url, kind)) as loader:
        assert batches(loader) == local(www, kind)


@kinds("parquet", "tokens")
@pytest.mark.parametrize("empty", [pytest.param(False, marks=pytest.mark.long), True])
def test_run_resumes_between_local_and_remote_shards(
    server: ToyServer, www: Path, tmp_path: Path, kind: str, empty: bool
) -> None:
    expected = local(www, kind)
    got: list[Any] = []
    state = None
    for files in (str(www / kind), urls_of(server.url, kind), str(www / kind)):
        with loader_of(kind, files, num_workers=1) as loader:
            if state is not None:
                loader.load_state_dict(state)
            got += batches(loader, 11)
            state = loader.state_dict()
        if empty:
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    assert got == expected[:33]


@pytest.mark.parametrize(
    ("kind", "fault"),
    [("parquet", "503"), ("arrow", "reset"), ("jsonl", "cut"), ("tokens", "less"), ("mds", "more")],
)
def test_transient_server_errors_change_nothing(server: ToyServer, www: Path, kind: str, fault: str) -> None:
    failed = set[str]()

    def once_a_path(path: str, number: int) -> str | None:
        failing = number % 3 == 0 and path not in failed
        failed.update([path] if failing else [])
        return fault if failing else None

    server.fault = once_a_path
    with loader_of(kind, urls_of(server.url, kind)) as loader:
        assert batches(loader) == local(www, kind)
    assert failed


@kinds("arrow", "tokens")
def test_a_downloader_that_is_killed_is_replaced(
    server: ToyServer, www: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache(monkeypatch)
    killed = set[int]()
    with loader_of(kind, urls_of(server.url, kind)) as loader:
        got = batches(loader, 3)
        for _ in range(2):
            dataset = next(one for one in loader._run.local._shared.values() if isinstance(one, Dataset))
            child = files_of(dataset).remote.session.connected()._child.process
            child.kill()
            child.wait()
            killed.add(child.pid)
            got += batches(loader, 3)
        assert len(killed) > 1
        assert got + batches(loader, STEPS - len(got)) == local(www, kind)


def files_of(dataset: Dataset) -> CachedBlocks:
    files = dataset.store.files  # type: ignore[attr-defined]
    assert isinstance(files, CachedBlocks)
    return files


def test_large_columns_that_are_not_chosen_are_not_downloaded(server: ToyServer, www: Path) -> None:
    for kind in ("parquet", "arrow"):
        table = pa.table({"pad": pa.array([bytes(PAD)] * 2500), "txt": pa.array([f"{i:0400d}" for i in range(2500)])})
        path = www / kind / "large"
        if kind == "parquet":
            pq.write_table(
                table, path.with_suffix(".parquet"), row_group_size=1250, compression="none", use_dictionary=False
            )
        else:
            with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as file:
                file.write_table(table, max_chunksize=1250)
        url = f"{server.url}/{kind}/large.{kind}"
        assert samples(kind, url, columns=["txt"]) == samples(kind, str(path.with_suffix(f".{kind}")), columns=["txt"])
        assert 400 * 2500 <= server.sent(f"large.{kind}") <= 1.03 * 404 * 2500


@kinds("jsonl", "litdata")
def test_file_rewritten_during_a_run_is_an_error_and_the_next_run_reads_it(
    server: ToyServer, www: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cache(monkeypatch)
    urls = urls_of(server.url, kind)
    with loader_of(kind, urls) as loader:
        batches(loader, 2)
        for name in names_of(kind):
            (www / kind / name).write_bytes((www / kind / name).read_bytes())  # another version, of the same size
        with pytest.raises(sp.ShardError, match="rewritten on the server") as caught:
            batches(loader)
        assert caught.value.reason == "changed shard"
    with loader_of(kind, urls) as loader:
        assert batches(loader) == local(www, kind)


@kinds("parquet", "tokens")
def test_rewritten_file_is_a_counted_skip_if_requested(server: ToyServer, www: Path, tmp_path: Path, kind: str) -> None:
    def run() -> tuple[set[str], int]:
        stage = ids_pipeline(kind, urls_of(server.url, kind), sp.Lane(), on_error="skip", epochs=1)
        keys = {key for batch in stage for _, key, _ in batch}
        return keys, sum(value for name, value in stage.source.counts.items() if name.startswith("skipped/"))

    whole, _ = run()
    (www / kind / names_of(kind)[1]).write_bytes((www / kind / names_of(kind)[1]).read_bytes())
    for blocks in (tmp_path / "cache").rglob("*.bytes"):
        blocks.unlink()  # nothing of them is in the cache any more
    assert run() == ({key for key in whole if not key.startswith(names_of(kind)[1])}, SIZES[1])


@kinds("parquet", "tokens", "mds")
def test_a_folder_in_a_bucket_is_listed(
    server: ToyServer, www: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    assert find_source(f"s3://{kind}/").format.name == kind
    with loader_of(kind, f"s3://{kind}/") as loader:
        assert batches(loader) == local(www, kind)


@kinds("arrow", "tokens", "litdata")
def test_web_folder_is_listed_by_its_index_without_a_scan(server: ToyServer, www: Path, kind: str) -> None:
    if kind not in LISTED:
        with pytest.raises(sp.ShardError, match="web servers cannot be listed"):
            READERS[kind](f"{server.url}/{kind}/", sp.Lane())
    index_files(www / kind, format_named(kind))
    READERS[kind](f"{server.url}/{kind}/", sp.Lane())
    assert not sent(server, kind)
    assert open_any(f"{server.url}/{kind}/").manifest() == open_any(str(www / kind)).manifest()
    with loader_of(kind, f"{server.url}/{kind}/") as loader:
        assert batches(loader) == local(www, kind)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_files_that_differ_from_their_index_are_an_error(server: ToyServer, www: Path, kind: str) -> None:
    index_files(www / kind, format_named(kind))
    path = www / kind / names_of(kind)[0]
    old, new = (b'"id": 0', b'"xx": 0') if kind == "jsonl" else (b"json", b"jsXn")
    path.write_bytes(path.read_bytes().replace(old, new))
    with pytest.raises(sp.ShardError, match="not as its index says") as caught:
        samples(kind, f"{server.url}/{kind}/")
    assert caught.value.reason == "changed shard"
    shutil.copytree(www / kind, www / "copy", ignore=shutil.ignore_patterns(".nv-meta"))
    assert samples(kind, f"{server.url}/{kind}/") == samples(kind, str(www / "copy"))  # indexed again, here


def test_replaced_bucket_file_is_reindexed_whatever_its_index_says(
    server: ToyServer, www: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_as_s3(server, monkeypatch)
    index_files(www / "jsonl", format_named("jsonl"))
    samples("jsonl", "s3://jsonl/")
    path = www / "jsonl" / names_of("jsonl")[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"x", b"y")  # neither the first line, nor one in the middle, nor the last
    path.write_bytes(b"".join(lines))
    for _ in range(2):
        assert samples("jsonl", "s3://jsonl/") == samples("jsonl", str(www / "jsonl"))
    sent = server.sent("")
    samples("jsonl", "s3://jsonl/")
    assert server.sent("") - sent < len(lines[0])  # nothing of the files


@kinds("arrow", "mds")
def test_indexed_file_rewritten_during_a_run_is_an_error_and_reindexed_next(
    server: ToyServer, www: Path, tmp_path: Path, kind: str
) -> None:
    index_files(www / kind, format_named(kind))
    url, (first, second, *_) = f"{server.url}/{kind}/", names_of(kind)
    expected = samples(kind, url)
    # One after the other: the first stays as it was indexed again.
    for name in (first, second):
        (www / kind / name).write_bytes((www / kind / name).read_bytes())  # another version, of the same size
        for blocks in (tmp_path / "cache").rglob("*.bytes"):
            blocks.unlink()
        if kind not in LISTED:  # files that an index.json names are asked for at each start
            with pytest.raises(sp.ShardError, match=f"{name}: the shard was rewritten on the server"):
                samples(kind, url)
        assert samples(kind, url) == expected
    sent = server.sent("") - server.sent("index.json")
    assert samples(kind, url) == expected
    assert server.sent("") - server.sent("index.json") == sent


def test_only_added_or_replaced_files_are_indexed(server: ToyServer, www: Path) -> None:
    urls, paths = urls_of(server.url, "jsonl"), [www / "jsonl" / name for name in names_of("jsonl")]
    open_any(urls[:3])
    sent = sent_before = server.sent("")
    open_any(urls)
    assert server.sent("") - sent == paths[3].stat().st_size
    sent = server.sent("")
    paths[1].write_bytes(paths[1].read_bytes().replace(b"x", b"y"))
    assert open_any(urls).manifest() == open_any(str(www / "jsonl")).manifest()
    assert server.sent("") - sent == paths[1].stat().st_size
    assert sent_before


def test_split_next_to_the_files_applies(server: ToyServer, www: Path) -> None:
    (www / "jsonl" / ".nv-meta").mkdir()
    (www / "jsonl" / ".nv-meta" / "split.yaml").write_text('{"split_parts": {"train": ["000{1..2}.jsonl"]}}')
    assert samples("jsonl", urls_of(server.url, "jsonl"), split="train") == samples(
        "jsonl", str(www / "jsonl"), split="train"
    )


def test_missing_object_is_an_error(server: ToyServer) -> None:
    with pytest.raises(sp.ShardError, match=r"/jsonl/0009\.jsonl: no such object"):
        custom.JsonlReader(f"{server.url}/jsonl/0009.jsonl", sp.Lane())
    with pytest.raises(sp.ShardError, match=r"a compressed file cannot be read at an offset. Unpack it"):
        custom.JsonlReader(f"{server.url}/jsonl/0.jsonl.gz", sp.Lane())


def test_process_killed_during_a_download_leaves_a_valid_cache(server: ToyServer, www: Path) -> None:
    for kind in ("parquet", "tokens"):
        for kill_at in (2, 5, 9):
            seen = server.requests
            child = os.fork()
            if not child:
                with contextlib.suppress(BaseException):
                    samples(kind, urls_of(server.url, kind))
                os._exit(0)

            def kill(path: str, number: int, child: int = child, after: int = seen + kill_at) -> str | None:
                if number >= after:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                return None

            server.fault = kill
            os.waitpid(child, 0)
            server.fault = lambda path, number: None
        assert samples(kind, urls_of(server.url, kind)) == samples(kind, str(www / kind))


def test_windows_of_flat_token_files_are_read_remotely(server: ToyServer, www: Path) -> None:
    read: Callable[[Any], Any] = lambda files: samples("tokens", files, length=33, stride=32, dtype="int32")  # noqa: E731
    (www / "tokens" / "0000.idx").unlink()
    (www / "tokens" / "0002.idx").unlink()
    assert read(urls_of(server.url, "tokens")) == read(str(www / "tokens"))


def test_a_folder_of_several_splits_is_rejected(server: ToyServer, www: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_as_s3(server, monkeypatch)
    (www / "arrow" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(sp.ShardError, match=r"1 split, train. Read the folder of one, such as train"):
        custom.ArrowReader("s3://arrow/", sp.Lane())

"""The table of media says what the headers do, of the shards that it was made of, or is refused."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.dataset import media_indexing
from savable_pipeline.data.dataset.media_indexing import index_media
from savable_pipeline.data.media import media_table
from savable_pipeline.data.media.media_info import MediaInfo
from savable_pipeline.data.media.media_table import MediaTotals
from savable_pipeline.data.shards.indexing import media_table_name
from savable_pipeline.errors import MediaError
from tests.support.draws import scaled_examples
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.shards import write_tar
from tests.support.toy_samples import plain_png
from tests.support.toy_server import serving

TABLE = media_table_name("tar")


@cache
def files() -> dict[str, list[bytes]]:
    """Some files of each part, one of them no media."""
    videos = [video_bytes(9), video_bytes(6, size=(48, 64), fps=24, audio="aac"), video_bytes(3, rotation=90)]
    sounds = [audio_bytes(0.5), audio_bytes(0.25, channels=2, rate=8000)]
    return {
        "mp4": [*videos, videos[0][:200]],
        "flac": [*sounds, b""],
        "MP3": [audio_bytes(0.5, container="mp3")],
        "seg.png": [plain_png(5, 7), plain_png(9, 2), b"none"],
        "json": [b"{}"],
    }


def write(root: Path, *shards: list[dict[str, int]]) -> Path:
    """Shards of samples: of each part the number of its file."""
    for number, samples in enumerate(shards):
        numbered = enumerate(samples)
        members = [(f"s{number}{i}.{part}", files()[part][n]) for i, parts in numbered for part, n in parts.items()]
        write_tar(root / f"{number}.tar", members)
    return root


def said(root: Path | str) -> list[Any]:
    """What `sample.media` gives of each part, or the error's text."""
    found = []
    for sample in sp.open_dataset(root):
        for part in sample:
            try:
                found.append(sample.media(part) if part != "json" else part)
            except MediaError as error:
                found.append(str(error))
    return found


def no_header(*_: object) -> MediaInfo:
    raise AssertionError("a header was read")


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = write(tmp_path / "data", [{"mp4": 0, "json": 0}, {"mp4": 1, "flac": 0}], [{"seg.png": 0, "mp4": 2}])
    time.sleep(0.02)  # more than a tick of the file system's clock: what is older than a table is not looked at again
    return root


_PARTS = st.fixed_dictionaries({}, optional={part: st.integers(0, 100) for part in files()}).filter(bool)
_SAMPLE = _PARTS.map(lambda parts: {part: number % len(files()[part]) for part, number in parts.items()})


@scaled_examples(5)
@given(shards=st.lists(st.lists(_SAMPLE, min_size=1, max_size=4), min_size=1, max_size=3))
def test_media_table_equals_the_headers(shards: list[list[dict[str, int]]], tmp_path_factory: Any) -> None:
    root = write(tmp_path_factory.mktemp("data"), *shards)
    before = said(root)
    faults = index_media(root)[1]
    assert said(root) == before
    broken = [text for text in before if isinstance(text, str) and text != "json"]
    assert (faults.count, faults.messages) == (len(broken), broken)
    shutil.rmtree(root)


def test_media_table_avoids_reading_headers(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = said(dataset)
    index_media(dataset)
    monkeypatch.setattr(media_table, "media_info", no_header)
    assert said(dataset) == before and MediaInfo(width=5, height=7) in before
    child = os.fork()
    if not child:
        os._exit(said(dataset) != before)
    assert os.waitpid(child, 0)[1] == 0


def test_subset_of_shards_uses_its_part_of_the_table(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = said(dataset / "1.tar")
    index_media(dataset)
    monkeypatch.setattr(media_table, "media_info", no_header)
    assert said(dataset / "1.tar") == before


def test_remote_table_is_copied_and_updated_when_replaced(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(dataset.parent / "cache"))
    before = said(dataset)
    with serving(dataset.parent) as server, monkeypatch.context() as patched:
        with monkeypatch.context() as unread:
            unread.setattr(media_table, "media_info", lambda *_: "by the headers")
            assert set(said(f"{server.url}/data/")) == {"by the headers", "json"}
        index_media(dataset)
        patched.setattr(media_table, "media_info", no_header)
        for _ in range(2):
            assert said(f"{server.url}/data/") == before
        assert server.sent("media.index") == (dataset / TABLE).stat().st_size
        (dataset / TABLE).unlink()
        patched.setattr(media_table, "media_info", lambda *_: MediaInfo(frames=3))
        index_media(dataset)
        assert set(said(f"{server.url}/data/")) == {MediaInfo(frames=3), "json"}


def test_images_in_columns_are_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"bytes": plain_png(3 + n, 4), "path": f"{n}.png"} for n in range(5)]
    parquet.write_table(pa.table({"image": rows, "n": list(range(5))}), tmp_path / "a.parquet")
    index_media(tmp_path)
    monkeypatch.setattr(media_table, "media_info", no_header)
    assert [sample.media().width for sample in sp.open_dataset(tmp_path)] == [3, 4, 5, 6, 7]


def rewritten(root: Path) -> None:  # by other pictures of as many bytes: the index does not tell
    write_tar(root / "1.tar", [("s10.seg.png", files()["seg.png"][1]), ("s10.mp4", files()["mp4"][2])])


def added(root: Path) -> None:
    write_tar(root / "2.tar", [("s20.flac", files()["flac"][1])])


def test_ranges_of_long_files_are_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    from tests.support.toy_lerobot import TOP, write_lerobot

    root = write_lerobot(tmp_path / "robot")
    before = [sample.media(TOP) for sample in sp.open_dataset(root)]
    index_media(root)
    monkeypatch.setattr(media_table, "media_info", no_header)
    assert [sample.media(TOP) for sample in custom.ParquetReader(root, sp.Lane(), shuffle=False, epochs=1)] == before
    assert len({info.duration_s for info in before}) > 1


def grown(root: Path) -> None:
    write_tar(root / "0.tar", [("s00.mp4", files()["mp4"][1])])


REWRITTEN = r"{} was rewritten(, or PyAV reads .*)?"


@pytest.mark.parametrize(
    ("change", "why"),
    [(rewritten, REWRITTEN.format("1.tar")), (grown, REWRITTEN.format("0.tar")), (added, "2.tar is not in it")],
)
def test_a_table_of_other_shards_is_rejected(dataset: Path, change: Callable[[Path], None], why: str) -> None:
    index_media(dataset)
    change(dataset)
    with pytest.raises(sp.ShardError, match=rf"{why}\)\. Run `savable index --media`"):
        said(dataset)
    if change is not rewritten:
        with pytest.raises(sp.ShardError, match=why):  # before a run starts
            sp.TarShardReader(dataset, sp.Lane())
    done: list[tuple[int, int]] = []
    index_media(dataset, progress=lambda *progress: done.append(progress))
    assert done == [(0, 1), (1, 1)]  # the other shards are not read again
    found = said(dataset)
    (dataset / TABLE).unlink()
    assert found == said(dataset)


def test_the_table_of_another_dataset_is_rejected(dataset: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other", [{"mp4": 1, "json": 0}, {"mp4": 1, "flac": 0}], [{"seg.png": 0, "mp4": 2}])
    index_media(other)
    shutil.copytree(other / ".nv-meta", dataset / ".nv-meta")
    (dataset / ".nv-meta/savable.index").unlink()
    with pytest.raises(sp.ShardError, match=r"0.tar was rewritten\)\. Run `savable index --media`"):
        said(dataset)


def test_a_damaged_or_cut_table_is_rejected_or_right(dataset: Path) -> None:
    before = said(dataset)
    index_media(dataset)
    path = dataset / TABLE
    whole = path.read_bytes()
    refused = 0
    rng = np.random.default_rng(0)
    for at in [*range(0, len(whole), 111), len(whole) - 1]:
        flipped = bytearray(whole)
        flipped[at] ^= int(rng.integers(1, 256))
        for damaged in (whole[:at], bytes(flipped)):
            path.write_bytes(damaged)
            try:
                assert said(dataset) == before
            except sp.ShardError as error:
                refused += 1
                assert str(path) in str(error)
                assert "`savable index --media`" in str(error)
    assert refused > len(whole) // 111 * 3 // 2


def test_interrupted_media_index_resumes(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_media(dataset, progress=stop)
    assert not (dataset / TABLE).exists()
    done: list[tuple[int, int]] = []
    index_media(dataset, progress=lambda *progress: done.append(progress))
    assert done == [(0, 1), (1, 1)]


def test_several_processes_build_the_same_table(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added(dataset)
    path, _ = index_media(dataset)
    alone = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(media_indexing, "_ALONE_S", 0.0)
    assert index_media(dataset, processes=2)[0].read_bytes() == alone


def test_a_shard_that_cannot_be_read_is_listed_and_the_others_are_in_the_table(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sp.open_dataset(dataset)
    monkeypatch.setattr(media_indexing, "open_files", as_indexed(dataset))
    grown(dataset)
    path, faults = index_media(dataset)
    assert (faults.count, faults.messages[0][:7]) == (1, "0.tar: ")
    assert path.exists()
    with pytest.raises(sp.ShardError, match=r"0.tar was rewritten\)\. Run"):
        said(dataset)


def as_indexed(root: Path) -> Any:
    """`open_files` for a folder whose shards change right after they were looked at."""
    found = media_indexing.open_files(root, media_indexing.find_source(root).format)
    return lambda *_, **__: found


def test_totals_have_hours_and_frequent_values(dataset: Path) -> None:
    index_media(dataset)
    table = sp.open_dataset(dataset).dataset.known_media.table
    assert table is not None
    totals = {part: MediaTotals.of(rows) for part, rows in table.by_part().items()}
    assert set(totals) == {"mp4", "flac", "seg.png"}
    assert totals["mp4"].parts == 3 and totals["mp4"].hours * 3600 == pytest.approx(0.75 + 0.25 + 0.25, abs=0.02)
    assert totals["mp4"].fps == "12 (67%)" and totals["seg.png"].size == "5×7" and totals["flac"].rate == "16,000 Hz"

"""Lengths by a table of media are those by the headers; a run never goes on by other ones."""

from __future__ import annotations

import logging
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.data.dataset.media_indexing import index_media
from savable_pipeline.data.media import media_table
from savable_pipeline.data.media.media_info import MediaInfo
from savable_pipeline.data.shards.indexing import media_table_name
from savable_pipeline.run.state.fingerprint import compare, fingerprint
from tests.support.media_files import audio_bytes
from tests.support.shards import write_tar
from tests.support.streams import next_hashes, through_a_file

TABLE = media_table_name("tar")
A_SECOND = 20  # tokens
SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 2}


class Sounds(sp.TaskEncoder):
    """A sound is as many numbers as `length_of` tells by its headers."""

    global_rng = False

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def length_of(self, sample: sp.Sample) -> int:
        length = round((sample.media().duration_s or 0) * A_SECOND)
        self.told.append((sample.key, length))
        return length

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> list[int]:
        sound = sample.audio()
        return [sample.index] * round(sound.samples().shape[1] / sound.rate * A_SECOND)

    def pack(self, items: list[list[int]], rng: sp.Rng) -> list[list[int]]:
        return items

    def batch(self, items: list[Any], rng: sp.Rng) -> list[Any]:
        return items


def pipeline(root: Path, lane: sp.Lane, encoder: Sounds | None = None) -> Any:
    samples = sp.TarShardReader(root, lane, block_size=1)
    packs = sp.OnlinePacker(sp.Encode(samples, encoder or Sounds()), max_length=30, open_packs=3)
    return sp.Batcher(packs, size=2)


def write(root: Path, shard: int, count: int = 9) -> None:
    numbers = range(shard * count, (shard + 1) * count)
    write_tar(root / f"{shard}.tar", [(f"s{n}.flac", audio_bytes((1 + n % 7) / A_SECOND)) for n in numbers])
    time.sleep(0.02)  # more than a tick of the file system's clock


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sounds")
    for shard in range(2):
        write(root, shard)
    return root


@pytest.fixture
def dataset(pristine: Path, tmp_path: Path) -> Path:
    root = tmp_path / "data"
    shutil.copytree(pristine, root)
    time.sleep(0.02)
    return root


def loader(root: Path) -> Any:
    return sp.SavableLoader(partial(pipeline, root), **SETTINGS)


def saved_after(root: Path, batches: int) -> dict[str, Any]:
    begun = loader(root)
    next_hashes(begun, batches)
    return through_a_file(begun.state_dict())


def resumed(root: Path, state: dict[str, Any], batches: int, **settings: Any) -> list[str]:
    again = loader(root)
    again.load_state_dict(state, **settings)
    return next_hashes(again, batches)


def with_other_values(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table as another release of PyAV might make it."""
    (root / TABLE).unlink(missing_ok=True)
    with monkeypatch.context() as patched:
        patched.setattr(media_table, "media_info", lambda *_: MediaInfo(duration_s=0.5))
        index_media(root)


def test_packer_gets_the_same_lengths_with_and_without_a_media_table(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_headers, by_table = Sounds(), Sounds()
    before = next_hashes(pipeline(dataset, sp.Lane(seed=3), by_headers), 12)
    index_media(dataset)

    def no_header(*_: object) -> MediaInfo:
        raise AssertionError("a header was read")

    monkeypatch.setattr(media_table, "media_info", no_header)
    assert next_hashes(pipeline(dataset, sp.Lane(seed=3), by_table), 12) == before
    assert by_table.told == by_headers.told and len({length for _, length in by_table.told}) > 3


@pytest.mark.parametrize("first", ["headers", "table"])
def test_run_resumes_with_an_added_or_removed_media_table(dataset: Path, first: str, caplog: Any) -> None:
    uninterrupted = next_hashes(loader(dataset), 14)
    if first == "table":
        index_media(dataset)
    state = saved_after(dataset, 7)
    if first == "table":
        (dataset / TABLE).unlink()
    else:
        index_media(dataset)
    with caplog.at_level(logging.WARNING):
        assert resumed(dataset, state, 7) == uninterrupted[7:]
    assert "media: saved " in caplog.text and "no table of media, so headers are read" in caplog.text


def test_run_rejects_a_media_table_of_other_values(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index_media(dataset)
    state = saved_after(dataset, 7)
    with_other_values(dataset, monkeypatch)
    with pytest.raises(sp.CheckpointMismatchError, match=r"\n  media: saved '.*has other values now"):
        resumed(dataset, state, 1)


def test_new_shards_join_with_their_media_table_unless_old_values_changed(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_media(dataset)
    state = saved_after(dataset, 7)
    write(dataset, 2)
    index_media(dataset)
    assert len(resumed(dataset, state, 9, allow={"shards"})) == 9
    with_other_values(dataset, monkeypatch)
    with pytest.raises(sp.CheckpointMismatchError, match=r"\n  media: saved "):
        resumed(dataset, state, 1, allow={"shards"})


def test_later_worker_uses_the_runs_first_media_table(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without: dict[str, bytes] = {}
    sp.TarShardReader(dataset, sp.Lane(worker=WorkerContext(pinned=without)))
    index_media(dataset)
    assert sp.TarShardReader(dataset, sp.Lane(worker=WorkerContext(pinned=without))).dataset.known_media.table is None
    given: dict[str, bytes] = {}
    sp.TarShardReader(dataset, sp.Lane(worker=WorkerContext(pinned=given)))
    write(dataset, 2)
    index_media(dataset)
    assert sp.TarShardReader(dataset, sp.Lane(worker=WorkerContext(pinned=given))).dataset.known_media.table is not None
    with_other_values(dataset, monkeypatch)
    with pytest.raises(sp.ShardError, match="the table of media was removed or changed during the run"):
        sp.TarShardReader(dataset, sp.Lane(worker=WorkerContext(pinned=given)))


def test_a_joined_store_has_its_table(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(tmp_path / "texts/0.tar", [(f"s{n}.txt", b"a") for n in range(9)])
    index_media(dataset)

    def joined(lane: sp.Lane) -> Any:
        return custom.Join(sp.TarShardReader(tmp_path / "texts", lane), {"sound": dataset})

    monkeypatch.setattr(media_table, "media_info", lambda *_: None)
    assert next(joined(sp.Lane())).media("sound.flac").duration_s
    before = fingerprint(joined(sp.Lane()), seed=3, lanes=2)
    with_other_values(dataset, monkeypatch)
    with pytest.raises(sp.CheckpointMismatchError, match=r"\n  joined_media: saved {'sound': '"):
        compare(before, fingerprint(joined(sp.Lane()), seed=3, lanes=2))

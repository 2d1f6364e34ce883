"""Rows that name ranges of long files give these ranges and nothing else, of files that are pinned as shards are."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores import shard_files
from savable_pipeline.data.stores.parquet import PARQUET
from tests.data.stores.test_columnar_store import write as columnar
from tests.support.media_files import audio_bytes, tone
from tests.support.toy_server import serving, use_as_s3

RATE = 8000
RANGES: Any = {"audio": ("path", "start", "end")}
ROWS: list[dict[str, Any]] = [
    {"id": 0, "path": "wav/a.wav", "start": 0.5, "end": 1.0},
    {"id": 1, "path": "wav/b.WAV", "start": 1.25, "end": 2.0},
    {"id": 2, "path": "wav/a.wav", "start": 3.0, "end": None},
    {"id": 3, "path": None, "start": None, "end": None},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    columnar(path, pa.Table.from_pylist(rows))


Write = Callable[[Path, list[dict[str, Any]]], None]
TABLES: dict[str, tuple[Write, Any]] = {
    "parquet": (write_table, custom.ParquetReader),
    "arrow": (write_table, custom.ArrowReader),
    "jsonl": (write_jsonl, custom.JsonlReader),
}
every_table = pytest.mark.parametrize("kind", TABLES)


def sound(frequency: int) -> bytes:
    """4 s that differ by the `frequency`, in a WAV."""
    made = audio_bytes(4.0, rate=RATE, container="wav", channels=1)
    return made[:-64000] + (np.frombuffer(made[-64000:], np.int16) // frequency).tobytes()


def write(folder: Path, kind: str = "parquet", rows: list[dict[str, Any]] = ROWS) -> Path:
    (folder / "wav").mkdir(parents=True, exist_ok=True)
    (folder / "wav/a.wav").write_bytes(sound(1))
    (folder / "wav/b.WAV").write_bytes(sound(3))
    TABLES[kind][0](folder / f"table.{kind}", rows)
    return folder


def samples(files: Any, kind: str = "parquet", **settings: Any) -> list[sp.Sample]:
    return list(TABLES[kind][1](files, sp.Lane(), ranges=RANGES, shuffle=False, epochs=1, **settings))


def sounds(files: Any, kind: str = "parquet") -> list[NDArray[np.float32]]:
    return [sample.audio("audio").samples() for sample in samples(files, kind) if "audio" in sample]


@every_table
def test_row_returns_its_range_of_a_file_next_to_the_table(tmp_path: Path, kind: str) -> None:
    first, *_, last = samples(write(tmp_path, kind), kind)
    assert list(first)[-1] == "audio" and "audio" not in last
    assert first.json("audio") == {"path": "wav/a.wav", "begin_s": 0.5, "end_s": 1.0}
    with pytest.raises(KeyError, match="'audio'"):
        last.audio("audio")
    whole = np.round(tone(4.0, RATE, 1)[0] * 32767).astype(np.int16)
    expected = [whole[4000:8000], whole[10000:16000] // 3, whole[24000:]]
    for found, wanted in zip(sounds(tmp_path, kind), expected, strict=True):
        assert found.shape == (1, len(wanted)) and np.abs(found[0] * 32768 - wanted).max() <= 1
    data = sp.open_dataset(tmp_path, ranges=RANGES)
    assert [row[:2] for row in data.dataset.manifest()] == [[f"table.{kind}", 4], ["wav/a.wav", 0], ["wav/b.WAV", 0]]
    assert data[1].audio("AUDIO").duration_s == 0.75


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("../secret.wav", "leads out"),
        ("wav/../../secret.wav", "leads out"),
        ("{root}/secret.wav", "leads out"),
        ("http://127.0.0.1:9/a.wav", "a URL"),
        ("file:///etc/a.wav", "a URL"),
        ("wav/none.wav", "not a file of the dataset"),
        ("wav/link.wav", "a link that leads out"),
        ("linked/secret.wav", "not a file of the dataset"),
        ("table.parquet/../wav/a.wav", "leads out"),
    ],
)
def test_path_outside_of_the_dataset_is_rejected_by_name(tmp_path: Path, path: str, fault: str) -> None:
    (tmp_path / "secret.wav").write_bytes(sound(1))
    path = path.format(root=tmp_path)
    folder = write(tmp_path / "data", rows=[{**ROWS[0], "path": path}])
    (folder / "wav/link.wav").symlink_to(tmp_path / "secret.wav")
    (folder / "linked").symlink_to(tmp_path)
    (sample,) = samples(folder)
    with pytest.raises(sp.ShardError, match=rf"table.parquet: row 0: names '{path}': .*{fault}"):
        sample.audio("audio")


def test_link_within_the_dataset_and_table_in_a_subfolder_are_read(tmp_path: Path) -> None:
    write(tmp_path / "en")
    (tmp_path / "en/wav/a.wav").rename(tmp_path / "a.wav")
    (tmp_path / "en/wav/a.wav").symlink_to(tmp_path / "a.wav")
    assert len(sounds(tmp_path)) == 3
    with pytest.raises(sp.ShardError, match="not a file of the dataset"):  # the table alone was named
        sounds(tmp_path / "en/table.parquet")
    assert (
        len(
            sounds(
                [
                    tmp_path / "en/table.parquet",
                    tmp_path / "en/wav/b.WAV",
                    tmp_path / "a.wav",
                    tmp_path / "en/wav/a.wav",
                ]
            )
        )
        == 3
    )


@every_table
@pytest.mark.parametrize("wrong", [{"end": 0.25}, {"start": -1.0}, {"start": "x"}, {"end": float("nan")}])
def test_invalid_range_is_a_data_error(tmp_path: Path, kind: str, wrong: dict[str, Any]) -> None:
    (sample,) = samples(write(tmp_path, kind, [{**ROWS[0], **wrong}]), kind)
    with pytest.raises(sp.ShardError, match="row 0: no range of a file") as caught:
        sample.audio("audio")
    assert caught.value.reason == "malformed range"


def test_range_columns_must_exist(tmp_path: Path) -> None:
    wrong: Any = {"audio": ("path", "begin", None)}
    with pytest.raises(ValueError, match="begin"):
        custom.ParquetReader(write(tmp_path), sp.Lane(), ranges=wrong)
    with pytest.raises(sp.ShardError, match=r"'begin', which ranges= names, is not there"):
        list(next(custom.JsonlReader(write(tmp_path / "lines", "jsonl"), sp.Lane(), ranges=wrong)))
    with pytest.raises(ValueError, match=r"ranges: 'audio' must be \(path, begin, end\), .*not 'path'"):
        custom.JsonlReader(tmp_path / "lines", sp.Lane(), ranges={"audio": "path"})  # type: ignore[dict-item]
    assert list(samples(tmp_path, columns=["id"])[0]) == ["id", "path", "start", "end", "audio"]


class Sounds(sp.TaskEncoder):
    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        sound = sample.audio("audio")
        return sound.samples(start := rng.random() * 0.2, start + 0.1)


def loader_of(folder: Any) -> sp.SavableLoader:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(custom.ParquetReader(folder, lane, ranges=RANGES), Sounds()), size=2)

    return sp.SavableLoader(pipeline, seed=0, lanes=1)


def test_long_file_overwritten_during_a_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_CHECK_S", 0.0)
    monkeypatch.setattr(shard_files, "_CHECK_MULTIPLE", 0)
    with loader_of(write(tmp_path, rows=ROWS[:3])) as loader:
        next(loader)
        time.sleep(0.02)  # a tick of the clock that stamps files
        with (tmp_path / "wav/a.wav").open("r+b") as file:
            file.seek(30000)
            file.write(bytes(100))
        with pytest.raises(sp.ShardError, match=r"a\.wav: it was overwritten while this run read it"):
            [next(loader) for _ in range(50)]


def test_long_file_replaced_between_runs_is_a_mismatch(tmp_path: Path) -> None:
    with loader_of(write(tmp_path, rows=ROWS[:3])) as loader:
        next(loader)
        state = loader.state_dict()
    (tmp_path / "wav/a.wav").write_bytes(sound(2))
    with loader_of(tmp_path) as loader, pytest.raises(sp.CheckpointMismatchError, match=r"rewritten: wav/a\.wav"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("change", ["removed", "renamed", "cut"])
def test_missing_long_file_is_an_error_at_start_and_during_a_run(tmp_path: Path, change: str) -> None:
    found = samples(write(tmp_path))
    path = tmp_path / "wav/a.wav"
    if change == "cut":
        os.truncate(path, 60000)
    else:
        path.rename(tmp_path / "wav/c.wav") if change == "renamed" else path.unlink()
    expected = "bytes, but 64" if change == "cut" else "It was there when .*indexed"
    with pytest.raises(sp.ShardError, match=rf"a\.wav: .*{expected}"):
        found[0].audio("audio")
    if change != "cut":
        with pytest.raises(sp.ShardError, match=r"1 indexed shards are gone, such as wav/a\.wav"):
            samples(tmp_path)


@pytest.mark.parametrize("through", ["http", "s3"])
def test_remote_ranges_equal_local_ones_and_download_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    folder = write(tmp_path / "www/corpus", rows=ROWS[:3])
    (folder / "wav/a.wav").write_bytes(audio_bytes(200.0, rate=RATE, container="wav"))
    expected = sounds(shutil.copytree(folder, tmp_path / "copy"))
    index_files(folder, PARQUET.for_settings({"ranges": {"a": ("b", None, None)}}))
    with serving(tmp_path / "www") as server:
        use_as_s3(server, monkeypatch)
        url = f"{server.url}/corpus/" if through == "http" else "s3://corpus/"
        there = samples(url)
        heads = [sample.audio("audio").samples(0, 0.25) for sample in there]
        assert all(np.array_equal(head, whole[:, :2000]) for head, whole in zip(heads, expected, strict=True))
        size = (folder / "wav/a.wav").stat().st_size
        assert 0 < server.sent("a.wav") < size // 2
        (folder / "wav/a.wav").write_bytes((folder / "wav/a.wav").read_bytes())  # another version, of the same size
        with pytest.raises(sp.ShardError, match="rewritten on the server"):
            there[2].audio("audio").samples()


def test_media_info_of_a_range_has_its_duration(tmp_path: Path) -> None:
    found = [sample.media("audio") for sample in samples(write(tmp_path)) if "audio" in sample]
    assert [info.duration_s for info in found] == [0.5, 0.75, 1.0]
    assert [(info.rate, info.frames) for info in found] == [(RATE, None)] * 3

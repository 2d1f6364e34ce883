"""Damage: what is skipped is counted and written down, the same again after a resume, and never beyond the limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.lane import WorkerContext
from savable_pipeline.core.on_error import Quarantine, is_environment_error
from savable_pipeline.data.dataset.ref import REF
from tests.conftest import write_tar
from tests.support.toy_faults import NumberEncoder
from tests.support.values_and_refs import values_and_refs


class Odd(NumberEncoder):
    """Cannot make anything of odd numbers; of multiples of six it makes two items, if `fan_out`, and then fails."""

    def __init__(self, error: Exception | None = None, fan_out: bool = False) -> None:
        self.error = error or ValueError("odd")
        self.fan_out = fan_out

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = super().encode(sample, rng)
        if number % 2:
            raise self.error
        return self._two(number) if self.fan_out and number % 6 == 0 else number

    def _two(self, number: int) -> Iterator[Any]:
        yield number
        yield number
        raise self.error


def reader(folder: Path, lane: sp.Lane | None = None, **settings: Any) -> sp.TarShardReader:
    return sp.TarShardReader(folder, lane or sp.Lane(), **{"shuffle": False, "epochs": 1, **settings})


def taken(stage: custom.Stage, n: int = 3) -> list[Any]:
    """All items of a stage, some at a time."""
    items = []
    while some := values_and_refs(stage, n)[0]:
        items += some
    return items


def skipped(stage: custom.Stage) -> Counter[str]:
    """What a stage skipped, by reason."""
    return Counter({name: count for name, count in stage.counts.items() if name.startswith("skipped/")})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# Faults of a sample.


def test_missing_library_is_not_an_error_of_a_sample(make_shards: Any) -> None:
    missing = ImportError("audio and video need PyAV. Run `pip install av`")
    stage = sp.Encode(reader(make_shards([4])), Odd(missing), on_error="skip")
    with pytest.raises(
        sp.EncodeError, match=r"failed on sample 's000001' of .*: ImportError: audio and video need PyAV"
    ):
        taken(stage)
    assert not skipped(stage)


def test_samples_that_fail_are_skipped_counted_and_written_down(make_shards: Any, tmp_path: Path) -> None:
    stage = sp.Encode(reader(make_shards([4, 3]), quarantine=tmp_path / "bad.jsonl"), Odd(), on_error="skip")
    assert taken(stage) == [0, 2, 4, 6]
    assert skipped(stage) == {"skipped/ValueError": 3}
    assert stage.save_state()["avoided"] == {}  # the data's fault: found again, not remembered
    first, *_, last = lines(tmp_path / "bad.jsonl")
    assert (first["shard"], first["key"], first["offset"], first["ref"][1:]) == ("0000.tar", "s000001", 1024, [0, 1, 0])
    assert (last["shard"], last["key"], last["reason"], last["lane"]) == ("0001.tar", "s000005", "ValueError", 0)
    assert "of 0001.tar: ValueError: odd" in last["detail"]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("cut", range(9))
def test_skipped_samples_are_skipped_again_after_a_resume(make_shards: Any, n: int, cut: int) -> None:
    def build() -> sp.Encode:
        return sp.Encode(reader(make_shards([4, 9])), Odd(fan_out=True), on_error="skip")

    whole = build()
    expected = taken(whole)
    assert expected == [0, 0, 2, 4, 6, 6, 8, 10, 12, 12]
    stage, items = build(), []
    for _ in range(cut):
        items += values_and_refs(stage, n)[0]
    after = build()
    after.restore_state(stage.save_state())
    assert items + taken(after, n) == expected
    assert skipped(stage) + skipped(after) == skipped(whole) == {"skipped/ValueError": 9}
    assert after.save_state()["errors"] == whole.save_state()["errors"] == 9
    assert after.save_state()["samples"] == whole.save_state()["samples"] == 13


def test_on_error_function_gets_the_encoders_error_and_decides(make_shards: Any) -> None:
    seen: list[Any] = []

    def decide(error: sp.SavableError) -> bool:
        seen.append(error)
        return isinstance(error.__cause__, ValueError)

    assert taken(sp.Encode(reader(make_shards([4])), Odd(), on_error=decide)) == [0, 2]
    assert [type(error) for error in seen] == [sp.EncodeError] * 2
    stage = sp.Encode(reader(make_shards([4])), Odd(KeyError("jpg")), on_error=decide)
    with pytest.raises(sp.EncodeError, match="KeyError"):
        values_and_refs(stage, 4)
    assert skipped(stage) == {}


def test_errors_beyond_the_limit_end_the_run_on_each_attempt(make_shards: Any) -> None:
    folder = make_shards([400])
    stage = sp.Encode(reader(folder), Odd(), on_error="skip", max_errors=2)
    assert values_and_refs(stage, 2)[0] == [0, 2]
    for _ in range(2):
        with pytest.raises(sp.EncodeError, match=r"3 of the first 6 samples of Lane\(0 of 1, seed=0\) .* max_errors=2"):
            values_and_refs(stage, 2)
    after = sp.Encode(reader(folder), Odd(), on_error="skip", max_errors=2)
    after.restore_state(stage.save_state())
    with pytest.raises(sp.EncodeError, match="3 of the first 6 samples"):
        values_and_refs(after, 2)
    share = sp.Encode(reader(folder), Odd(), on_error="skip", max_errors=0.5)
    assert len(taken(share)) == 200
    with pytest.raises(sp.EncodeError, match="101 of the first 202 samples"):  # 100 are never too large a share
        taken(sp.Encode(reader(folder), Odd(), on_error="skip"))


@pytest.mark.parametrize("settings", [{"on_error": "ignore"}, {"max_errors": -1}, {"max_errors": 1.5}])
def test_invalid_policy_is_rejected(make_shards: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Encode: "):
        sp.Encode(reader(make_shards([4])), Odd(), **settings)
    with pytest.raises(ValueError, match=r"TarShardReader: on_error=.*Pass 'raise', 'skip'"):
        reader(make_shards([4]), on_error=None)


def test_image_bomb_and_invalid_image_are_skipped_before_they_use_memory(tmp_path: Path) -> None:
    chunk = b"IHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    huge = b"\x89PNG\r\n\x1a\n\0\0\0\r" + chunk + zlib.crc32(chunk).to_bytes(4, "big") + b"\0\0\0\0IDAT" + bytes(4)
    write_tar(tmp_path / "a.tar", [("a.png", huge), ("b.png", bytes(500)), ("c.txt", b"")])
    stage = sp.Encode(reader(tmp_path), Image(), on_error="skip")
    assert taken(stage) == []
    assert skipped(stage) == {
        "skipped/DecompressionBombError": 1,
        "skipped/UnidentifiedImageError": 1,
        "skipped/KeyError": 1,
    }


class Image(NumberEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.image().size


@pytest.mark.parametrize(
    ("error", "environment"),
    [
        (FileNotFoundError(2, "gone"), True),
        (OSError("image file is truncated"), False),  # how Pillow says it
        (TimeoutError("slow"), True),
        (ConnectionResetError(104, "reset"), True),
        (MemoryError(), True),
        (sp.ShardError("x"), True),
        (ValueError("x"), False),
        (KeyError("jpg"), False),
    ],
)
def test_environment_errors_are_distinguished_from_data_errors(error: Exception, environment: bool) -> None:
    assert is_environment_error(error) is environment


# Faults of the environment.


@pytest.fixture
def three(make_shards: Any) -> Path:
    folder: Path = make_shards([4, 4, 4])
    sp.TarShardReader(folder, sp.Lane())  # indexed
    return folder


DAMAGE = {
    "missing shard": lambda path: path.unlink(),
    "changed shard": lambda path: os.truncate(path, 2000),
    "changed shard: grown": lambda path: path.write_bytes(path.read_bytes() + bytes(512)),
    "changed shard: swapped": lambda path: write_tar(path, [("x.json", b"{}"), ("y.json", b"1" * 2000)]),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_shards_deleted_or_changed_during_a_run_are_skipped_and_remembered(
    three: Path, reason: str, tmp_path: Path
) -> None:
    def build(on_error: str = "skip") -> sp.Encode:
        source = reader(three, on_error=on_error, quarantine=tmp_path / "bad.jsonl")
        return sp.Encode(source, NumberEncoder())

    before, tolerant = build("raise"), build()
    original = (three / "0001.tar").read_bytes()
    DAMAGE[reason](three / "0001.tar")
    short = reason.partition(":")[0]
    with pytest.raises(sp.ShardError, match=r"0001\.tar"):
        taken(before)
    assert values_and_refs(tolerant, 5)[0] == [0, 1, 2, 3, 8]
    assert skipped(tolerant) == {f"skipped/{short}": 4}
    state = tolerant.save_state()
    assert {r: np.frombuffer(raw, REF)["index"].tolist() for r, raw in state["avoided"].items()} == {
        short: [4, 5, 6, 7]
    }
    assert [line["ref"][2] for line in lines(tmp_path / "bad.jsonl")] == [4, 5, 6, 7]
    after = build()  # the index keeps the shard, so that the state fits
    assert after.source.settings() == tolerant.source.settings()
    after.restore_state(state)
    assert taken(after) == [9, 10, 11]
    fresh = build()
    fresh.restore_state({**state, "refs": np.array([(i, 0) for i in range(12)], REF).tobytes()})
    (three / "0001.tar").write_bytes(original)  # it is back; what was skipped stays skipped
    assert taken(fresh) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert skipped(fresh) == {f"skipped/{short}": 4}


def test_unreadable_disk_is_a_shard_error(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = sp.Encode(reader(three, on_error="skip"), NumberEncoder())
    assert values_and_refs(stage, 5)[0] == [0, 1, 2, 3, 4]
    pread = os.pread

    def broken(fd: int, size: int, offset: int) -> bytes:
        if offset in (1024 + 512, 3 * 1024 + 512):  # the payloads of the second and fourth sample of a shard
            raise OSError(5, "Input/output error")
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", broken)
    assert taken(stage) == [6, 8, 10]
    assert skipped(stage) == {"skipped/unreadable shard": 4}


def test_damaged_rest_of_a_shard_is_reported_once_per_epoch(make_shards: Any, tmp_path: Path) -> None:
    folder = make_shards([4, 4])
    os.truncate(folder / "0000.tar", 2500)  # in the third sample
    with pytest.raises(sp.ShardError, match=r"0000\.tar: .*truncated"):
        reader(folder)
    stages = [
        sp.Encode(
            reader(folder, sp.Lane(i, 2), on_error="skip", quarantine=tmp_path / "bad.jsonl", epochs=2, block_size=1),
            NumberEncoder(),
        )
        for i in range(2)
    ]
    items = [item for stage in stages for item in taken(stage)]
    found = Counter(items)
    assert found == dict.fromkeys([0, 4, 5, 6, 7], 2) | ({1: 2} if 1 in found else {})
    counts = stages[0].source.counts + stages[1].source.counts
    assert counts == {"skipped/rest of a damaged or missing shard": 2, "source/0/skipped": 2}
    assert {line["shard"] for line in lines(tmp_path / "bad.jsonl")} == {"0000.tar"}


def test_a_missing_tar_of_a_list_or_a_pattern_is_skipped(three: Path) -> None:
    (three / "0001.tar").unlink()
    for shards in (str(three / "{0000..0002}.tar"), [three / f"{i:04d}.tar" for i in range(3)]):
        with pytest.raises(sp.ShardError, match="no such file"):
            sp.TarShardReader(shards, sp.Lane())
        source = sp.TarShardReader(shards, sp.Lane(), shuffle=False, epochs=1, on_error="skip")
        assert taken(sp.Encode(source, NumberEncoder())) == [0, 1, 2, 3, 8, 9, 10, 11]


# What is avoided, and what can no longer be made again.


def test_a_ref_that_is_avoided_is_skipped_now_and_after_a_resume(make_shards: Any) -> None:
    def build() -> sp.Encode:
        return sp.Encode(reader(make_shards([9]), epochs=2), Odd(fan_out=True), on_error="skip")

    stage = build()
    stage.avoid(4, 0, "killed its worker")
    stage.avoid(2, 1, "hung")
    state = stage.save_state()
    after = build()
    after.restore_state(state)
    for one in (stage, after):
        assert taken(one) == [0, 0, 2, 6, 6, 8, 0, 0, 4, 6, 6, 8]
        assert one.counts["skipped/killed its worker"] == one.counts["skipped/hung"] == 1


def test_sample_avoided_within_its_parts_yields_no_more_of_them(make_shards: Any) -> None:
    stage = sp.Encode(reader(make_shards([9])), Odd(fan_out=True), on_error="skip")
    assert values_and_refs(stage, 1)[0] == [0]
    state = stage.save_state()
    after = sp.Encode(reader(make_shards([9])), Odd(fan_out=True), on_error="skip")
    after.restore_state(state)
    after.avoid(0, 0, "killed its worker")
    assert taken(after) == [2, 4, 6, 6, 8]


class Packing(NumberEncoder):
    def length(self, item: Any) -> int:
        return 4


@pytest.mark.parametrize("gone", [1, 0])
def test_buffered_items_that_cannot_be_rebuilt_leave_their_pack_or_batch(three: Path, gone: int) -> None:
    def build() -> sp.Batcher:
        items = sp.Encode(reader(three, on_error="skip"), Packing())
        packs = sp.OnlinePacker(items, max_length=13, policy="first_fit", open_packs=1)
        return sp.Batcher(packs, size=2)

    stage = build()
    assert next(stage) == [[0, 1, 2], [3, 4, 5]]
    state = stage.save_state()  # 6, and what else was placed, are held as refs
    (three / f"000{gone}.tar").unlink()
    after = build()
    after.restore_state(state)
    rest = [number for batch in after for pack in batch for number in pack]
    assert rest == ([8, 9, 10, 11] if gone else [6, 7, 8, 9, 10, 11])
    assert skipped(after.source.source) == ({"skipped/missing shard": 2} if gone else {})


# The status, and the file.


def test_error_note_names_the_current_stage_and_sample(make_shards: Any) -> None:
    status = memoryview(bytearray(24)).cast("Q")
    seen: list[tuple[str, list[int]]] = []

    class Watching(NumberEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
            seen.append(("encode", status.tolist()))
            return super().encode(sample, rng)

        def pack(self, items: list[Any], rng: sp.Rng) -> Any:
            seen.append(("pack", status.tolist()[:1]))
            return items

        def batch(self, items: list[Any], rng: sp.Rng) -> Any:
            seen.append(("batch", status.tolist()[:1]))
            return items

    lane = sp.Lane(worker=WorkerContext(status=status))
    source = reader(make_shards([2]), lane, epochs=2)
    items = sp.Encode(sp.ShuffleBuffer(source, size=1), Watching(), check=0.0)
    list(sp.Batcher(sp.OnlinePacker(items, max_length=2), size=2))
    assert [words for name, words in seen if name == "encode"] == [[2, 0, 0], [2, 1, 0], [2, 0, 1], [2, 1, 1]]
    assert {(name, words[0]) for name, words in seen} == {("encode", 2), ("pack", 3), ("batch", 4)}


def append(path: Path, process: int) -> None:
    file = Quarantine(path)
    for i in range(200):
        file.add(process=process, number=i, detail="x" * (i * 37 % 3000))


def test_many_processes_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=append, args=(path, i)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    whole = [json.loads(line) for line in path.read_text().splitlines() if line]  # empty ones may lie between
    found = {(line["process"], line["number"]) for line in whole}
    assert len(whole) == 800 and found == {(process, number) for process in range(4) for number in range(200)}


def test_a_quarantine_that_cannot_be_written_is_a_warning(make_shards: Any, tmp_path: Path, caplog: Any) -> None:
    source = reader(make_shards([4]), quarantine=tmp_path / "no" / "folder.jsonl")
    assert taken(sp.Encode(source, Odd(), on_error="skip")) == [0, 2]
    assert "folder.jsonl: cannot be written (No such file or directory)" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_encoder_that_uses_a_gpu_gets_an_error_that_names_on_device(make_shards: Any) -> None:
    items = sp.read(make_shards([2])).map(lambda sample: torch.zeros(2).cuda())
    with pytest.raises(sp.EncodeError, match=r"An encoder has no GPU: remove \.cuda\(\), and pass the loader to"):
        items.take(1)

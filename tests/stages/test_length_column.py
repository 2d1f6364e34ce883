"""A length column decides like `length_of`, of the same numbers, and nothing but this column is read for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores.grouped_store import ColumnarStore

ROWS = [(40, 7), (9, 9), (31, 5)]  # of each file, and of its row groups


class Sized(sp.TaskEncoder):
    """Items of as many tokens as the column says, measured by `length_of`."""

    global_rng = False
    one_to_one = True

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return [int(token) for token in sample.text("text").split()]

    def length_of(self, sample: sp.Sample) -> int | None:
        return len(sample.text("text").split())

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [token for item in items for token in item]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


class ByColumn(Sized):
    """The same, measured by the column."""

    length_column = "n_tokens"

    def length_of(self, sample: sp.Sample) -> int | None:
        raise AssertionError("length_of was called")


def table_of(first: int, rows: int, **columns: Any) -> pa.Table:
    numbers = range(first, first + rows)
    texts = [" ".join(map(str, range(number, number + 1 + number % 9))) for number in numbers]
    lengths = [1 + number % 9 for number in numbers]
    return pa.table({"text": texts, "n_tokens": lengths, "id": list(numbers), **columns})


@pytest.fixture(scope="module", params=["parquet", "arrow"])
def tables(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp(request.param)
    first = 0
    for number, (rows, size) in enumerate(ROWS):
        table = table_of(first, rows)
        if request.param == "parquet":
            pq.write_table(table, folder / f"{number}.parquet", row_group_size=size)
        else:
            with pa.ipc.new_stream(folder / f"{number}.arrow", table.schema) as stream:
                stream.write_table(table, max_chunksize=size)
        first += rows
    return str(folder)


def packed(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).pack(max_length=12).balance(candidates=3, cost=sp.attention_cost(hidden=1)).batch(2)


def bucketed(samples: Any, encoder: sp.TaskEncoder) -> Any:
    return samples.encode(encoder).shuffle(5).bucket([3, 6, 9], size=2)


def mixed(samples: Any, encoder: sp.TaskEncoder) -> Any:
    kinds = {name: samples.encode(encoder) for name in ("a", "b")}
    return sp.blend(kinds, weights={"a": 2, "b": 1}, by="tokens").pack(max_length=12).batch(2)


def run(pipeline: Any, *, cuts: tuple[int, ...] = (), workers: int = 0) -> Iterator[Any]:
    """The batches of a run that is resumed after each of these numbers of batches."""
    state = None
    for taken in (*cuts, 8):
        with sp.SavableLoader(pipeline, seed=7, lanes=2, num_workers=workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            yield from (next(loader) for _ in range(taken))
            state = loader.state_dict()


@pytest.mark.parametrize("build", [packed, bucketed, mixed])
def test_packs_by_a_length_column_equal_those_by_length_of_also_after_resumes(tables: str, build: Any) -> None:
    expected = list(run(build(sp.read(tables).shuffle(9), Sized())))
    pipeline = build(sp.read(tables).shuffle(9), ByColumn())
    assert list(run(pipeline)) == expected
    assert list(run(pipeline, cuts=(1, 3, 2)))[:8] == expected
    assert list(run(pipeline, cuts=(3,), workers=2))[:8] == expected


def test_length_column_works_with_a_join_a_subset_and_chosen_columns(tables: str) -> None:
    for samples in (
        sp.join(sp.read(tables, columns=["text"], subset=0.5), {"other": tables}, missing="empty"),
        sp.read(tables, columns=["text"], key="id"),
    ):
        assert list(run(packed(samples, ByColumn()))) == list(run(packed(samples, Sized())))


def test_skipping_reads_no_other_column(tables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[str] | None] = []
    original = ColumnarStore.decoded

    def noted(store: ColumnarStore, shard: int, group: int, expected: int) -> tuple[Any, int]:
        decoded.append(store.wanted)
        return original(store, shard, group, expected)

    monkeypatch.setattr(ColumnarStore, "decoded", noted)
    loader, plain = (sp.SavableLoader(packed(sp.read(tables).shuffle(9), ByColumn()), seed=7, lanes=2) for _ in "ab")
    loader.skip(6)
    assert decoded and all(columns == ["n_tokens"] for columns in decoded)
    expected = [next(plain) for _ in range(12)][6:]
    assert [next(loader) for _ in range(6)] == expected
    assert None in decoded and loader.state_dict() == plain.state_dict()


@pytest.mark.parametrize("value", [None, 2.5, "many", -1])
def test_row_without_a_length_is_named_or_skipped(tmp_path: Path, value: Any) -> None:
    lengths = [value if at == 3 else 1 + at % 9 for at in range(8)]
    if value == "many":
        lengths = list(map(str, lengths))
    pq.write_table(
        table_of(0, 8).drop_columns("n_tokens").append_column("n_tokens", pa.array(lengths)), tmp_path / "a.parquet"
    )
    pipeline = packed(sp.read(str(tmp_path), shuffle=False, epochs=1), ByColumn())
    with pytest.raises(sp.ShardError, match=r"a\.parquet: row 3: column 'n_tokens' has no whole number"):
        list(sp.SavableLoader(pipeline, seed=7, lanes=1))
    skipping = packed(sp.read(str(tmp_path), shuffle=False, epochs=1, on_error="skip"), ByColumn())
    loader = sp.SavableLoader(skipping, seed=7, lanes=1)
    tokens = sorted(token for batch in loader for pack in batch for token in pack)
    assert tokens == sorted(token for at in range(8) if at != 3 for token in range(at, at + 1 + at % 9))
    assert loader.stats()["Encode/skipped/no length"] == 1


def test_item_of_another_length_than_the_column_is_an_error(tmp_path: Path) -> None:
    pq.write_table(table_of(0, 8, n_tokens=[1] * 8), tmp_path / "a.parquet")
    with pytest.raises(sp.EncodeError, match=r"ByColumn\.length_column declared 1, but length of the item is 2"):
        list(sp.SavableLoader(packed(sp.read(str(tmp_path), shuffle=False), ByColumn()), seed=7, lanes=1))


def test_unknown_length_column_or_other_format_is_rejected_when_the_pipeline_is_built(
    tables: str, tmp_path: Path
) -> None:
    class Misspelled(ByColumn):
        length_column = "tokens"

    class WithImages(ByColumn):
        def images(self, item: Any) -> int:
            return 1

    with pytest.raises(ValueError, match=r"no column tokens; it has id, n_tokens, text\. Use one"):
        packed(sp.read(tables), Misspelled())(sp.Lane())
    with pytest.raises(ValueError, match=r"WithImages has length_column and images\. Add images_of\."):
        packed(sp.read(tables), WithImages())(sp.Lane())
    (tmp_path / "a.jsonl").write_text('{"text": "1", "n_tokens": 1}\n')
    with pytest.raises(ValueError, match=r"neither Parquet nor Arrow\. Write length_of"):
        packed(sp.read(str(tmp_path)), ByColumn())(sp.Lane())


def test_state_is_not_loaded_with_another_length_column(tables: str) -> None:
    class Other(ByColumn):
        __qualname__ = ByColumn.__qualname__
        length_column = "id"

    first = sp.SavableLoader(packed(sp.read(tables), ByColumn()), seed=7, lanes=1)
    next(first)
    with pytest.raises(sp.CheckpointMismatchError, match="length_column"):
        sp.SavableLoader(packed(sp.read(tables), Other()), seed=7, lanes=1).load_state_dict(first.state_dict())


def test_file_changed_after_its_lengths_were_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table_of(0, 400), path, row_group_size=50)
    loader = sp.SavableLoader(packed(sp.read(str(tmp_path), shuffle=False), ByColumn()), seed=7, lanes=1)
    loader.skip(2)
    pq.write_table(table_of(7, 400), path, row_group_size=50)
    with pytest.raises(sp.ShardError):
        for _ in range(60):
            next(loader)

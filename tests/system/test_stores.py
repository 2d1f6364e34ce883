"""The promise over every store: exact resumes, and from each the batches that the same samples in tars give."""

from __future__ import annotations

import json
import pickle
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import first_difference
from savable_pipeline.testing import assert_exact_resume
from tests.support.toy_pipelines import toy_pipeline
from tests.support.toy_stores import KEYED, READERS, WRITERS, number_of, reader_of

SIZES = [23, 40, 1, 31]
KINDS = [kind for kind in KEYED if kind != "tar"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_are_exact_with_other_workers_and_ranks(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path, SIZES)
    pipeline = partial(toy_pipeline, str(tmp_path), store=kind)
    assert_exact_resume(pipeline, seed=3, lanes=2, steps=5, world_sizes=(1, 2), chains=1, after=2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])  # which is one shard
def test_every_store_yields_equal_batches_of_equal_samples(tmp_path: Path, kind: str) -> None:
    for each in ("tar", kind):
        WRITERS[each](tmp_path / each, SIZES)
    batches = [
        list(islice(toy_pipeline(str(tmp_path / each), sp.Lane(1, 3, 7), store=each, block_size=5, window=2), 15))
        for each in ("tar", kind)
    ]
    assert len(batches[0]) == 15
    assert not first_difference(*batches)


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.long), pytest.param("spawn", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", [k for k in KINDS if k in ("parquet", "arrow")])
def test_pyarrow_is_safe_in_workers_of_every_start_method(tmp_path: Path, kind: str, method: str) -> None:
    WRITERS[kind](tmp_path, SIZES)
    pipeline = partial(toy_pipeline, str(tmp_path), store=kind)
    with sp.SavableLoader(pipeline, seed=3, lanes=4) as loader:  # decodes here, before workers are started
        expected = [str(batch) for batch in islice(loader, 8)]
    with sp.SavableLoader(pipeline, seed=3, lanes=4, num_workers=2, workers=sp.Workers(start_method=method)) as loader:
        assert [str(batch) for batch in islice(loader, 8)] == expected


def test_a_mixture_reads_every_store_by_the_names_of_its_files(tmp_path: Path) -> None:
    sources = []
    for kind in KEYED:
        WRITERS[kind](tmp_path / kind, SIZES)
        sources.append(f"  {kind}: {{path: {kind}, repetitions: 1}}\n")
    (tmp_path / "mixture.yaml").write_text("sources:\n" + "".join(sources))
    ids = [number_of(sample) for sample in custom.read_mixture(tmp_path / "mixture.yaml").samples(sp.Lane(seed=7))]
    assert sorted(ids) == sorted([*range(sum(SIZES))] * len(KEYED))


def test_a_mixture_rejects_settings_of_another_kind_of_files(tmp_path: Path) -> None:
    WRITERS["jsonl"](tmp_path / "lines", SIZES)
    (tmp_path / "mixture.yaml").write_text("sources: {a: {path: lines, weight: 1, columns: [json]}}")
    with pytest.raises(ValueError, match=r"columns= does not apply to .*/lines: jsonl files"):
        custom.read_mixture(tmp_path / "mixture.yaml").samples(sp.Lane())


ROWS = [
    {
        "messages": [{"role": "user"}],
        "text": "a",
        "label": 5,
        "ok": False,
        "empty": "",
        "meta": {"json": 1},
        "null": None,
    },
    {"messages": [], "text": "b", "label": 0, "ok": True, "empty": "", "meta": {"json": None}, "null": None},
]
FIELDS = ["messages", "text", "label", "ok", "empty", "meta"]  # not null


def _names_it_knows(sample: sp.Sample) -> list[str]:
    """The names by which a sample gives a part: `[]`, `in`, `get`, iteration and `len` must agree on them."""
    listed = list(sample)
    assert len(sample) == len(listed) == len(set(listed)) and listed == sample.keys()
    asked = [*listed, *(name.upper() for name in listed), *ROWS[0], "json", "tokens", "image", "jpg", "png", "cls", ""]
    known = []
    for name in dict.fromkeys([*asked, *(f"other.{name}" for name in asked)]):
        try:
            value = sample[name]
        except KeyError:
            assert name not in sample and sample.get(name, "absent") == "absent", name
        else:
            assert name in sample and sample.get(name) == value, name
            known.append(name)
    assert set(listed) <= set(known)
    return known


@pytest.mark.parametrize("kind", WRITERS)
def test_samples_of_every_store_list_their_parts(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path, SIZES)
    sample = next(reader_of(kind, str(tmp_path), sp.Lane(), shuffle=False))
    assert _names_it_knows(sample)
    assert _names_it_knows(pickle.loads(pickle.dumps(sample)))
    if kind in KEYED:
        files = sp.open_dataset(tmp_path, key=READERS[kind][1].get("key"))
        joined = next(custom.Join(reader_of(kind, str(tmp_path), sp.Lane(), shuffle=False), {"other": files}))
        assert {"json", "other.json"} <= set(_names_it_knows(joined))


def test_jsonl_fields_are_parts_like_table_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines, table = sp.open_dataset(tmp_path / "a.jsonl"), sp.open_dataset(tmp_path / "a.parquet")
    for line, row, values in zip(lines, table, ROWS, strict=True):
        assert [name for name in line if name != "json"] == list(row) == FIELDS
        assert "json" in line and line.json() == values and "json" not in row
        for name in FIELDS:
            assert line[name] == row[name] and line.decoded()[name] == row.decoded()[name]
        for sample in (line, row, pickle.loads(pickle.dumps(line)), pickle.loads(pickle.dumps(row))):
            assert _names_it_knows(sample)
            assert "null" not in sample and sample.get("messages") == sample["messages"]

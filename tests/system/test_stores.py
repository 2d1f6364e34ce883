"""The promise over every store: exact resumes, and from each the batches that the same samples in tars give."""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import first_difference
from savable_pipeline.testing import assert_exact_resume
from tests.support.toy_stores import WRITERS, store_pipeline

SIZES = [23, 40, 1, 31]
KINDS = [kind for kind in WRITERS if kind != "tar"]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_are_exact_with_other_workers_and_ranks(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path, SIZES)
    pipeline = partial(store_pipeline, kind, str(tmp_path))
    assert_exact_resume(pipeline, seed=3, lanes=4, steps=12, world_sizes=(1, 2), chains=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_samples_cut_alike_give_equal_batches_from_every_store(tmp_path: Path, kind: str) -> None:
    for each in ("tar", kind):
        WRITERS[each](tmp_path / each, SIZES)
    batches = [
        list(islice(store_pipeline(each, str(tmp_path / each), sp.Lane(1, 3, 7), block_size=5, window=2), 40))
        for each in ("tar", kind)
    ]
    assert len(batches[0]) == 40
    assert not first_difference(*batches)


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.long), pytest.param("spawn", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("kind", [k for k in KINDS if k in ("parquet", "arrow")])
def test_pyarrow_is_safe_in_workers_of_every_start_method(tmp_path: Path, kind: str, method: str) -> None:
    WRITERS[kind](tmp_path, SIZES)
    pipeline = partial(store_pipeline, kind, str(tmp_path))
    with sp.SavableLoader(pipeline, seed=3, lanes=4) as loader:  # decodes here, before workers are started
        expected = [str(batch) for batch in islice(loader, 8)]
    with sp.SavableLoader(pipeline, seed=3, lanes=4, num_workers=2, multiprocessing_context=method) as loader:
        assert [str(batch) for batch in islice(loader, 8)] == expected


def test_a_mixture_reads_every_store_by_the_names_of_its_files(tmp_path: Path) -> None:
    sources = []
    for kind, write in WRITERS.items():
        write(tmp_path / kind, SIZES)
        sources.append(f"  {kind}: {{path: {kind}, repetitions: 1}}\n")
    (tmp_path / "mixture.yaml").write_text("sources:\n" + "".join(sources))
    ids = [sample.json()["id"] for sample in sp.read_mixture(tmp_path / "mixture.yaml").samples(sp.Lane(seed=7))]
    assert sorted(ids) == sorted([*range(sum(SIZES))] * len(WRITERS))


def test_a_mixture_refuses_settings_of_another_kind_of_files(tmp_path: Path) -> None:
    WRITERS["jsonl"](tmp_path / "lines", SIZES)
    (tmp_path / "mixture.yaml").write_text("sources: {a: {path: lines, weight: 1, columns: [json]}}")
    with pytest.raises(ValueError, match="'columns' is no setting of JsonlReader"):
        sp.read_mixture(tmp_path / "mixture.yaml").samples(sp.Lane())


@pytest.mark.long
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(KINDS),
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    block_size=st.sampled_from([None, 1, 5]),
    subset=st.sampled_from([None, 0.7]),
    buffer=st.sampled_from([1, 7, 60]),
    packed=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_random_pipelines_over_every_store_resume_exactly(
    kind: str, sizes: list[int], block_size: int | None, subset: float | None, buffer: int, packed: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        WRITERS[kind](Path(folder), [*sizes, 80])
        how = {"block_size": block_size, "subset": subset, "buffer": buffer, "packed": packed}
        pipeline = partial(store_pipeline, kind, folder, **how)
        assert_exact_resume(pipeline, seed=seed, steps=20, workers=(0, 1, 2), world_sizes=(1, 2, 3), chains=1, after=1)

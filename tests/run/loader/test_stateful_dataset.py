"""`StatefulDataset` under torchdata's own loader, and the traps of that loader."""

from __future__ import annotations

import gc
import io
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_numbers import counted_pipeline
from tests.support.toy_pipelines import toy_pipeline

SMALL = [30, 7, 35]  # samples of shards: two rounds of 12 lanes


@pytest.fixture(autouse=True)
def closed_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A torch loader that failed waits five seconds for each of its workers, which nobody has told to end."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


@pytest.fixture
def pipeline(make_shards: Any) -> Any:
    return partial(toy_pipeline, str(make_shards([40, 7, 60])))


def loader(pipeline: Any, num_workers: int, **options: Any) -> Any:
    dataset = sp.StatefulDataset(pipeline, seed=3, lanes=12)
    return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers, collate_fn=unchanged, **options)


def unchanged(batch: Any) -> Any:
    """In place of that loader's own conversion of NumPy arrays to tensors."""
    return batch


def take(batches: Any, n: int) -> list[str]:
    return [digest(batch) for _, batch in zip(range(n), batches, strict=False)]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # the loader's own part of it holds more than plain values


@pytest.mark.parametrize("num_workers", [0, 3])
def test_stateful_dataset_yields_the_batches_of_savable_loader_in_order(pipeline: Any, num_workers: int) -> None:
    with sp.SavableLoader(pipeline, seed=3, lanes=12) as own:
        expected = take(own, 20)
    assert take(loader(pipeline, num_workers), 20) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_chains_of_resumes_are_exact_with_the_same_workers(pipeline: Any, num_workers: int) -> None:
    expected = take(loader(pipeline, num_workers), 16)
    found: list[str] = []
    state = None
    for steps in (3, 0, 1, 5, 7):
        resumed = loader(pipeline, num_workers)
        if state is not None:
            resumed.load_state_dict(state)
        found += take(iter(resumed), steps)
        state = through_a_file(resumed.state_dict())
    assert found == expected


def test_state_between_snapshots_is_exact(pipeline: Any) -> None:
    expected = take(loader(pipeline, 2), 12)
    first = loader(pipeline, 2, snapshot_every_n_steps=4)
    batches = iter(first)
    assert take(batches, 6) == expected[:6]
    resumed = loader(pipeline, 2, snapshot_every_n_steps=4)
    resumed.load_state_dict(through_a_file(first.state_dict()))
    assert take(iter(resumed), 6) == expected[6:]


def test_a_state_before_the_first_batch_changes_nothing(pipeline: Any) -> None:
    expected = take(loader(pipeline, 2), 8)
    asked = loader(pipeline, 2)
    state = through_a_file(asked.state_dict())
    assert take(asked, 8) == expected
    resumed = loader(pipeline, 2)
    resumed.load_state_dict(state)
    assert take(resumed, 8) == expected


def test_a_state_that_was_returned_does_not_change_later(pipeline: Any) -> None:
    dataset = sp.StatefulDataset(pipeline, seed=3, lanes=12)
    batches = iter(dataset)
    next(batches)
    state = dataset.state_dict()
    before = dict(state)
    next(batches)
    assert state == before != dataset.state_dict()


@pytest.mark.parametrize(("num_workers", "options"), [(0, {}), (2, {"persistent_workers": True})])
def test_each_epoch_is_whole_and_differs_from_the_previous(
    make_shards: Any, num_workers: int, options: dict[str, Any]
) -> None:
    finite = partial(toy_pipeline, str(make_shards(SMALL)), epochs=1)
    with sp.SavableLoader(finite, seed=3, lanes=12) as own:
        expected = [[digest(batch) for batch in own] for _ in range(3)]
    batches = loader(finite, num_workers, **options)
    epochs = [take(batches, 1000) for _ in range(3)]
    for ours, theirs in zip(expected, epochs, strict=True):
        assert theirs[: len(ours)] == ours and len(ours) > 3
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_resume_in_the_second_epoch_and_at_the_end_of_the_first(make_shards: Any, num_workers: int) -> None:
    finite = partial(toy_pipeline, str(make_shards(SMALL)), epochs=1)
    uninterrupted = loader(finite, num_workers)
    first, second, third = (take(uninterrupted, 1000) for _ in range(3))

    ended = loader(finite, num_workers)
    assert take(ended, 1000) == first
    state = through_a_file(ended.state_dict())
    resumed = loader(finite, num_workers)
    resumed.load_state_dict(state)
    assert take(resumed, 1000) == second

    inside = loader(finite, num_workers)
    take(inside, 1000)
    batches = iter(inside)
    assert take(batches, 5) == second[:5]
    resumed = loader(finite, num_workers)
    resumed.load_state_dict(through_a_file(inside.state_dict()))
    assert take(resumed, 1000) == second[5:]
    assert take(resumed, 1000) == third


@pytest.mark.parametrize(
    ("num_workers", "kind"),
    [
        (0, "counted"),
        (2, "packed"),
        pytest.param(0, "packed", marks=pytest.mark.long),
        pytest.param(1, "packed", marks=pytest.mark.long),
        pytest.param(1, "counted", marks=pytest.mark.long),
        pytest.param(2, "counted", marks=pytest.mark.landing),
    ],
)
def test_saving_at_every_step_repeats_no_epoch(make_shards: Any, num_workers: int, kind: str) -> None:
    """Above all right after an epoch's last batch, before its end is told."""
    shards = str(make_shards(SMALL))
    finite: Any = (
        partial(toy_pipeline, shards, epochs=1) if kind == "packed" else partial(counted_pipeline, shards, size=8)
    )
    uninterrupted = loader(finite, num_workers)
    first, second, third = (take(uninterrupted, 1000) for _ in range(3))
    for step in range(len(first) - 1, len(first) + 1):
        saved = loader(finite, num_workers)
        assert take(islice(saved, step), 1000) == first[:step]
        resumed = loader(finite, num_workers)
        resumed.load_state_dict(through_a_file(saved.state_dict()))
        rest = take(resumed, 1000)
        if step == len(first) and rest == second:  # that loader passes over a pass that has ended
            rest = []
        else:
            assert take(resumed, 1000) == second
        assert rest == first[step:]
        assert take(resumed, 1000) == third


def test_padded_epoch_yields_every_sample_once_in_loader_order(make_shards: Any) -> None:
    evaluation = partial(counted_pipeline, str(make_shards([50, 21])), size=8, shuffle=False)
    dataset = sp.StatefulDataset(evaluation, seed=3, lanes=12, tail="pad")
    batches = StatefulDataLoader(dataset, batch_size=None, num_workers=3, collate_fn=unchanged)
    for _ in range(2):
        found = [number for batch in batches for number in batch["id"][batch["valid"]].tolist()]
        assert found == list(range(71))


def test_another_number_of_workers_is_a_clear_error(pipeline: Any) -> None:
    saved = loader(pipeline, 2)
    take(iter(saved), 4)
    resumed = loader(pipeline, 3)
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(sp.CheckpointMismatchError, match=r"has 2 workers .* not 3\."):
        next(iter(resumed))


def test_workers_and_ranks_that_do_not_divide_the_lanes_are_a_clear_error(pipeline: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 ranks × 5 workers .* num_workers=1, 2, 3, 4, 6, 12, or"):
        next(iter(loader(pipeline, 5)))


def test_ranks_and_workers_together_yield_the_slots_in_order(pipeline: Any) -> None:
    with sp.SavableLoader(pipeline, seed=3, lanes=12) as own:
        expected = take(own, 16)
    for rank in range(2):
        dataset = sp.StatefulDataset(pipeline, seed=3, lanes=12, ranks=(rank, 2))
        ranked = StatefulDataLoader(dataset, batch_size=None, num_workers=2, collate_fn=unchanged)
        assert take(ranked, 8) == expected[rank::2]


def test_shards_added_during_a_run_wait_for_the_next_start(make_shards: Any) -> None:
    folder = make_shards([20, 20, 20])
    later = folder.parent / "0002.tar"
    (folder / "0002.tar").rename(later)
    pipeline = partial(counted_pipeline, str(folder))
    undisturbed = loader(pipeline, 2)
    expected = [take(undisturbed, 100) for _ in range(2)]
    unopened, begun = loader(pipeline, 2), loader(pipeline, 2)
    assert take(begun, 100) == expected[0]
    shutil.copy(later, folder)
    assert [take(unopened, 100), take(begun, 100)] == expected

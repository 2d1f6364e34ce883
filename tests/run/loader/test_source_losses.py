"""A source of which much is left out is warned of, and one that gives nothing ends the run."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.filters import Filter
from savable_pipeline.testing import assert_exact_resume

Skips = Callable[[sp.Sample], str]


class Numbers(sp.TaskEncoder):
    """(source, number) of each sample; skips those for which `skips` has a reason."""

    global_rng = False

    def __init__(self, skips: Skips) -> None:
        self.skips = skips

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        reason = self.skips(sample)
        return sp.Skip(reason) if reason else (len(sample.source), sample.json()["id"])

    def length(self, item: Any) -> int:
        return 100 if item[1] % 20 == 7 else 10

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return items[0]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return torch.tensor(items)


def all_of_web(sample: sp.Sample) -> str:
    return "no text" if sample.source == "web" else ""


def few_of_web(sample: sp.Sample, *, share: float) -> str:
    return "longer than max_length" if sample.source == "web" and sample.ref.index % 100 < 100 * share else ""


def only_early(sample: sp.Sample) -> str:
    """The source gives 5 of its samples, in its first epoch, and nothing later."""
    return "no text" if sample.source == "web" and (sample.ref.epoch or sample.ref.index > 4) else ""


def blended(root: str, skips: Skips, lane: sp.Lane, *, buffer: int = 20) -> custom.Stage:
    """Two sources of the same shards, "web" and "books", of which "web" is nine tenths."""
    sources = {name: sp.TarShardReader(root, lane) for name in ("web", "books")}
    samples = sp.ShuffleBuffer(sp.Blend(sources, weights={"web": 9, "books": 1}), size=buffer)
    return sp.Batcher(sp.Encode(samples, Numbers(skips)), size=2)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.funcName == "_warn_of_fraction"]


def steps_until_error(pipeline: Any, *, cut_every: int = 0, most: int = 400, **settings: Any) -> tuple[int, str]:
    """How many batches come before the error, and the error, of a run that is resumed again and again."""
    state, steps = None, 0
    while True:
        with sp.SavableLoader(pipeline, **{"seed": 7, "lanes": 8, **settings}) as own:
            if state is not None:
                own.load_state_dict(state)
            try:
                for _ in range(cut_every or most):
                    next(own)
                    steps += 1
            except sp.EncodeError as error:
                return steps, str(error)
            state = own.state_dict()
        assert steps < most, "no error"


@pytest.mark.parametrize(
    ("lanes", "buffer", "most", "num_workers"), [(1, 1, 330, 0), (8, 1, 1000, 2), (96, 1, 1600, 0), (96, 20, 1800, 0)]
)
def test_source_that_yields_nothing_in_its_first_epoch_is_an_error(
    make_shards: Any, num_workers: int, lanes: int, buffer: int, most: int
) -> None:
    """All lanes must have had their first epoch, or together five: a buffer holds some of the first back."""
    pipeline = partial(blended, str(make_shards([150, 150])), all_of_web, buffer=buffer)
    steps, error = steps_until_error(pipeline, lanes=lanes, num_workers=num_workers)
    found = re.match(r"Encode skipped the first ([\d,]+) samples of the source 'web'", error)
    assert found and 300 <= int(found[1].replace(",", "")) <= most and steps <= most / 15
    assert f": 'no text' {found[1]}. " in error and f"on {lanes} lanes" in error


def test_large_source_that_yields_nothing_is_an_error_after_10_000_samples(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_text("".join(json.dumps({"id": n}) + "\n" for n in range(30_000)))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        sources = {name: custom.JsonlReader(tmp_path / "large.jsonl", lane) for name in ("web", "books")}
        return sp.Batcher(sp.Encode(sp.Blend(sources, weights={"web": 49, "books": 1}), Numbers(all_of_web)), size=2)

    steps, error = steps_until_error(pipeline)
    assert 90 <= steps <= 115
    assert "skipped the first 10," in error


@pytest.mark.parametrize("cut_every", [1])
def test_resumed_run_raises_the_error_at_the_same_step(make_shards: Any, cut_every: int) -> None:
    pipeline = partial(blended, str(make_shards([300])), all_of_web)
    assert steps_until_error(pipeline, cut_every=cut_every) == steps_until_error(pipeline)


def test_source_that_yielded_something_is_no_error(make_shards: Any) -> None:
    pipeline = partial(blended, str(make_shards([60])), only_early)
    assert_exact_resume(pipeline, lanes=4, steps=20, chains=1)
    with sp.SavableLoader(pipeline, seed=7, lanes=4) as own:
        expected = [next(own) for _ in range(120)]
    with sp.SavableLoader(pipeline, seed=7, lanes=4) as own:
        for _ in range(40):
            next(own)
        state = own.state_dict()
    with sp.SavableLoader(pipeline, seed=7, lanes=4) as own:
        own.load_state_dict(state)
        found = [next(own) for _ in range(80)]
    assert all(map(torch.equal, found, expected[40:]))
    for rank in range(2):  # whose lanes may have had none of the five
        with sp.SavableLoader(pipeline, seed=7, lanes=4, ranks=(rank, 2)) as own:
            own.load_state_dict(state)
            assert all(torch.equal(next(own), batch) for batch in expected[40 + rank :: 2])
    assert any((batch[:, 0] == len("web")).any() for batch in expected[:40])
    assert not any((batch[:, 0] == len("web")).any() for batch in found)


@pytest.mark.parametrize(("num_workers", "blend"), [(0, True), (2, False)])
def test_finite_epoch_that_yields_nothing_is_an_error(make_shards: Any, num_workers: int, blend: bool) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        reader = partial(sp.TarShardReader, root, epochs=1)
        samples = sp.Blend({"web": reader(lane), "books": reader(lane)}) if blend else reader(lane)
        skips: Skips = all_of_web if blend else lambda sample: "no text"
        return sp.Batcher(sp.Encode(samples, Numbers(skips)), size=2)

    root, named = str(make_shards([40])), "the source 'web'" if blend else "the data"
    with (
        sp.SavableLoader(pipeline, seed=7, lanes=4, num_workers=num_workers) as own,
        pytest.raises(sp.EncodeError, match=rf"Encode skipped the first [\d,]+ samples of {named}") as found,
    ):
        list(own)
    assert "Check the names of parts in the encoder" in str(found.value)


def no_fourth(sample: sp.Sample) -> bool:
    return bool(sample.json()["id"] % 4)


def finite_blend(root: str, lane: sp.Lane, *, web: int = 1) -> custom.Stage:
    """Of "web" a filter leaves out a quarter, and the encoder the rest, long before "books" ends."""
    readers: dict[str, Any] = {"books": sp.TarShardReader(root, lane, epochs=1)}
    readers["web"] = Filter(sp.TarShardReader(f"{root}/0000.tar", lane, epochs=1), no_fourth)
    samples = sp.Blend(readers, weights={"web": web, "books": 1})
    return sp.Batcher(sp.Encode(samples, Numbers(all_of_web)), size=2)


def test_resume_near_the_end_of_an_empty_epoch_raises_the_error(make_shards: Any) -> None:
    def until_error(state: Any = None, **how: Any) -> tuple[int, str]:
        batches = 0
        with sp.SavableLoader(partial(finite_blend, root, **how), seed=7, lanes=2) as own:
            if state is not None:
                own.load_state_dict(state, allow={"weights"})
            try:
                for _ in own:
                    batches += 1
                    states.append(own.state_dict())
            except sp.EncodeError as error:
                return batches, str(error)
        return batches, ""

    states: list[Any] = []
    root = str(make_shards([12, 20]))
    batches, message = until_error()
    assert message.startswith("Encode skipped the first 9 samples of the source 'web'")
    assert batches > 10
    for cut, state in enumerate(states[: batches - 1], 1):
        assert until_error(state) == (batches - cut, message)
    assert not until_error(states[batches - 2], web=0)[1], "it is off since"


def test_branch_that_ends_without_a_sample_is_an_error(make_shards: Any) -> None:
    """Its `Encode` alone sees it, and the Blend goes on without it."""

    def pipeline(lane: sp.Lane) -> custom.Stage:
        encoder = Numbers(all_of_web)
        web = sp.Encode(sp.TarShardReader(root, lane, epochs=1), encoder)
        books = sp.Encode(sp.TarShardReader(root, lane), encoder)
        return sp.Batcher(sp.Blend({"web": web, "books": books}, weights={"web": 1, "books": 1}), size=2)

    root = str(make_shards([40]))
    steps, error = steps_until_error(pipeline, lanes=4)
    assert steps <= 12 and error.startswith("Encode skipped the first 40")


def test_loss_above_a_tenth_warns_once_with_reason_and_fix(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = partial(blended, str(make_shards([1200])), partial(few_of_web, share=0.6))
    with sp.SavableLoader(pipeline, seed=7, lanes=8, num_workers=2) as own:
        for _ in range(100):
            next(own)
        assert not said(caplog)  # of 1,000 samples of the source
        for _ in range(900):
            next(own)
        stats = own.stats()
    (told,) = said(caplog)
    assert told.startswith("Encode skips 60 % of the source 'web': 'longer than max_length' ") or "59 %" in told
    assert told.endswith(". Change the encoder or its settings, or the data.")
    assert stats["source/web/skipped/longer than max_length"] == stats["source/web/skipped"] > 1000


def test_loss_of_a_small_source_warns_after_an_epoch(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    with sp.SavableLoader(
        partial(blended, str(make_shards([100])), partial(few_of_web, share=0.6)), seed=7, lanes=4
    ) as own:
        for _ in range(100):
            next(own)
    (told,) = said(caplog)
    assert "of the source 'web': 'longer than max_length' " in told


def test_loss_below_a_tenth_does_not_warn(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = partial(blended, str(make_shards([200])), partial(few_of_web, share=0.05))
    with sp.SavableLoader(pipeline, seed=7, lanes=4) as own:
        for _ in range(600):  # more than 1,000 samples of the source
            next(own)
    assert not said(caplog)


class OnlyBooks(custom.PassThrough, custom.SampleStage):
    """A filter."""

    def __next__(self) -> sp.Sample:
        return next(sample for sample in self.source if sample.source != "web")


def nothing(sample: sp.Sample) -> str:
    return ""


@pytest.mark.parametrize("how", ["exclude", "decide", "filter"])
def test_excluded_and_filtered_samples_are_not_losses(
    make_shards: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    root = str(make_shards([20]))
    keys = [sample.key for sample in sp.open_dataset(root)[:]]
    (tmp_path / "exclude.jsonl").write_text("".join(json.dumps({"key": key}) + "\n" for key in keys))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        exclude = tmp_path / "exclude.jsonl" if how == "exclude" else None
        web, books = sp.TarShardReader(root, lane, exclude=exclude), sp.TarShardReader(root, lane)
        samples: Any = sp.Blend({"web": web, "books": books}, weights={"web": 1, "books": 1})
        return sp.Batcher(sp.Encode(OnlyBooks(samples) if how == "filter" else samples, Numbers(nothing)), size=2)

    with sp.SavableLoader(pipeline, seed=7, lanes=4) as own:
        if how == "decide":
            own.reconfigure(exclude=[("web", key) for key in keys])
        batches = [next(own) for _ in range(500)]
    assert all((batch[:, 0] == len("books")).all() for batch in batches)
    assert not said(caplog)


def packed(root: str, lane: sp.Lane, **settings: Any) -> custom.Stage:
    """Of the samples 5 % are 100 long, a third of all tokens; the others are 10 long."""
    items = sp.Encode(sp.ShuffleBuffer(sp.TarShardReader(root, lane), size=20), Numbers(nothing))
    return sp.Batcher(sp.OnlinePacker(items, **{"max_length": 50, **settings}), size=2)


def test_tokens_dropped_by_packing_warn_once(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    root = str(make_shards([400]))
    with (
        caplog.at_level(logging.WARNING),
        sp.SavableLoader(partial(packed, root), seed=7, lanes=4, num_workers=2) as own,
    ):
        for _ in range(200):
            next(own)
    (told,) = [record.getMessage() for record in caplog.records if "max_length" in record.getMessage()]
    assert told.startswith("OnlinePacker skips 5 % of the samples, 3") and "% of its tokens" in told
    assert "Pass too_long='split', 'truncate' or 'skip'" in told


def test_tokens_dropped_on_request_do_not_warn(make_shards: Any, caplog: pytest.LogCaptureFixture) -> None:
    with sp.SavableLoader(partial(packed, str(make_shards([400])), too_long="skip"), seed=7, lanes=4) as own:
        for _ in range(200):
            next(own)
    assert not said(caplog)


def test_a_source_of_which_no_item_fits_a_pack_is_an_error(make_shards: Any) -> None:
    class Long(Numbers):
        def length(self, item: Any) -> int:
            return 100 if item[0] == len("web") else 10

    def pipeline(lane: sp.Lane) -> custom.Stage:
        sources = {name: sp.TarShardReader(root, lane) for name in ("web", "books")}
        return sp.Batcher(sp.OnlinePacker(sp.Encode(sp.Blend(sources), Long(nothing)), max_length=50), size=2)

    root = str(make_shards([100]))
    _, error = steps_until_error(pipeline, lanes=4)
    assert error.startswith("OnlinePacker skipped the first 1")
    assert "'longer than max_length' 1" in error and "Pass too_long='split', 'truncate' or 'skip'" in error


def test_consecutive_losses_are_counted_by_source_without_a_loader(make_shards: Any) -> None:
    batches = blended(str(make_shards([10])), all_of_web, sp.Lane())
    with pytest.raises(
        sp.EncodeError, match=r"skipped 1,600 samples of the source 'web' in a row, the last one with 'no text'"
    ):
        for _ in range(500):
            next(batches)

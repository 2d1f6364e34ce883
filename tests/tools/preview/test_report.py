"""The report of a ledger: its numbers are those of the run, and its page is one file without scripts."""

from __future__ import annotations

import os
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.run.ledger.reader import LedgerFiles
from savable_pipeline.run.ledger.records import Batch, Numbers, framed, read_records
from savable_pipeline.run.loader import ledger_keeper
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.preview.ledger_numbers import (
    BatchCounts,
    CostStep,
    CounterTotals,
    ExpectedShares,
    waiting_fraction,
)
from savable_pipeline.tools.preview.report_page import diagram, report_page, run_advice, wait_verdict
from tests.support.shards import write_numbered_shards
from tests.support.toy_pipelines import ToyEncoder

SCHEDULE = sp.Schedule([(0, {"a": 3, "b": 1}), (300, {"a": 1, "b": 3})])


def packed(folder: str, lane: sp.Lane) -> custom.Stage:
    sources = {name: sp.TarShardReader(folder, lane) for name in ("a", "b")}
    items = sp.Encode(sp.Blend(sources, weights=SCHEDULE, stride=4), ToyEncoder(fan_out=0))
    packs = sp.OnlinePacker(items, max_length=20, max_cost=400, cost=lambda length, images: length * length)
    return sp.Batcher(packs, size=2)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the ledger of two ranks with 20 batches each, and again from the 15th on."""
    root = tmp_path_factory.mktemp("run")
    write_numbered_shards(root / "shards", [60])
    pipeline, folder = partial(packed, str(root / "shards")), root / "ledger"
    state: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_keeper, "_LEAST_S", 0.0)
        for _ in range(2):
            ranks = [sp.SavableLoader(pipeline, seed=3, lanes=4, ranks=(i, 2), ledger=folder) for i in range(2)]
            for own in ranks:
                if state:
                    own.load_state_dict(state)
            for step in range(20):
                for own in ranks:
                    next(own)
                if step == 14:
                    kept = sp.merge_states([own.state_dict() for own in ranks])
            state = kept
            for own in ranks:
                own.close()
    return folder


def test_batches_and_counters_are_those_of_the_run(ledger: Path) -> None:
    given, counters = BatchCounts(LedgerFiles(ledger)), CounterTotals(LedgerFiles(ledger))
    assert (given.batches, given.lost) == (2 * 35, 2 * 5)
    kept = [each.batch for each in LedgerFiles(ledger).batches() if not each.lost]
    assert sum(given.samples) == sum(batch.items for batch in kept)
    assert counters.totals["batches"] == 4 * 20 and counters.totals["samples"] > sum(given.samples)
    assert counters.totals["Encode/skipped/every 7th"] == sum(
        counters.totals[f"source/{name}/skipped"] for name in "ab"
    )
    assert 0 < counters.totals["wait_s"] < counters.seconds
    found = wait_verdict(counters)
    assert found is not None and found.verdict == "data-bound"
    assert any("num_workers=" in sentence for sentence in run_advice(counters, slowest_wait=0.0))


def test_report_of_an_idle_trainer_does_not_suggest_millions_of_workers(ledger: Path) -> None:
    counters = CounterTotals(LedgerFiles(ledger))
    counters.totals["wait_s"] = counters.seconds * 0.9999  # type: ignore[assignment]
    told = list(run_advice(counters, slowest_wait=0.0))
    assert "did hardly anything but wait" in told[0] and not any("num_workers=" in sentence for sentence in told)


def test_plotted_proportions_follow_the_schedule(ledger: Path) -> None:
    given = BatchCounts(LedgerFiles(ledger))
    expected = ExpectedShares(LedgerFiles(ledger).starts[0])
    assert expected.of(0, 300) == [0.75, 0.25] and expected.of(200, 400) == [0.5, 0.5]
    first, last = given.pieces()[0], given.pieces()[-1]
    assert first.samples[0] > first.samples[1] and last.samples[0] < last.samples[1]


def test_plotted_proportions_equal_plain_weights(make_shards: Any, tmp_path: Path) -> None:
    folder = str(make_shards([30]))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        sources = {name: sp.TarShardReader(folder, lane) for name in ("a", "b")}
        return sp.Batcher(sp.Blend(sources, weights={"a": 3, "b": 1}), size=2)

    with sp.SavableLoader(pipeline, seed=3, lanes=2, ledger=tmp_path / "ledger") as loader:
        next(loader)
    expected = ExpectedShares(LedgerFiles(tmp_path / "ledger").starts[0])
    assert expected.names == ["a", "b"] and expected.of(0, 100) == [0.75, 0.25]


def test_waiting_is_relative_to_the_most_expensive_batch_of_each_step(ledger: Path) -> None:
    assert waiting_fraction([CostStep(0, [10, 10]), CostStep(1, [10, 30])]) == 1 - 60 / 80
    steps = BatchCounts(LedgerFiles(ledger)).steps
    assert len(steps) == 35 and 0 < waiting_fraction(steps) < 1
    records = [record for path in ledger.glob("*") for record in read_records(path)]
    costs = [record.cost for record in records if isinstance(record, Batch)]
    assert 0 < max(costs) <= 2 * 400


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_the_page_is_one_file_with_images_and_no_scripts(ledger: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["ledger", "report", str(ledger), "-o", str(page)])
    assert result.exit_code == 0, result.output
    tags = Tags()
    tags.feed(page.read_text())
    names = [name for name, _ in tags.found]
    assert not {"script", "link", "img", "iframe"} & set(names) and "http:" not in page.read_text()
    assert f"savable_pipeline {sp.__version__}, 20" in page.read_text() and ">documentation</a>" in page.read_text()
    assert names.count("figure") == 4  # waiting, sources, fill, ranks
    points = [attrs["points"] for name, attrs in tags.found if name == "polyline"]
    assert all(re.fullmatch(r"(\d+\.\d,\d+\.\d ?){2,}", text or "") for text in points)
    for text in ("data-bound", "every 7th", "by the schedule", "Waiting for the slowest rank", "Packing efficiency"):
        assert text in page.read_text()


def test_a_ledger_without_counters_still_has_a_page(ledger: Path, tmp_path: Path) -> None:
    """As one whose run was killed before it noted any."""
    for path in ledger.glob("*"):
        records = [record for record in read_records(path) if not isinstance(record, Numbers)]
        (tmp_path / path.name).write_bytes(b"".join(map(framed, records)))
    page = report_page(LedgerFiles(tmp_path)).decode()
    assert "how long the trainer waited is not known" in page and "Fraction of the samples yielded" in page


def test_plot_has_its_points_within_its_frame() -> None:
    drawn = diagram({"x": [(3, 0.0), (7, 0.6)]}, "steps", expected={"x": [(3, 0.2)]})
    assert drawn is not None and diagram({"x": [(3, 0.0)]}, "steps") is None
    assert [line.dashed for line in drawn.lines] == [True, False]
    (left, bottom), (right, top) = (map(float, point.split(",")) for point in drawn.lines[1].points.split())
    assert left == pytest.approx(drawn.left + 3 / 7 * (drawn.right - drawn.left), abs=0.1), "the axis starts at 0"
    assert (right, bottom) == (drawn.right, drawn.bottom) and top >= drawn.top
    assert [tick.text for tick in drawn.rows] == ["0%", "20%", "40%", "60%"]


@pytest.mark.parametrize(("cores", "said"), [(1, "has 1 core, so build batches on other machines"), (10**6, "cores.")])
def test_needed_workers_are_shown_with_the_cores_of_the_run(ledger: Path, cores: int, said: str) -> None:
    counters = CounterTotals(LedgerFiles(ledger))
    assert counters.cores == os.cpu_count()
    counters.cores = cores
    counters.totals["wait_s"], counters.totals["work_s"] = counters.seconds / 2, 3 * counters.seconds
    first = next(iter(run_advice(counters, slowest_wait=0.0)))
    assert "num_workers=" in first and said in first, first


def test_times_are_in_ms_with_two_digits(ledger: Path) -> None:
    page = report_page(LedgerFiles(ledger)).decode()
    (row,) = re.findall(r"<tr><th>a batch is built</th>(.*)</tr>", page)
    assert re.fullmatch(r"(<td>[\d,]+\.\d\d</td>){3}", row), row

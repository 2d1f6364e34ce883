"""A format of one's own, as docs/own-format.md adds it: recognized, indexed, read, checked and resumed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline.data.stores import formats
from savable_pipeline.data.stores.opening import find_source, index_any
from savable_pipeline.testing import assert_exact_resume
from savable_pipeline.tools.check.dataset_check import check_dataset
from tests.project.pages import ROOT, blocks_of

PAGE = ROOT / "docs/own-format.md"


@pytest.fixture(autouse=True)
def vectors(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The format of the page, which is registered as the page says."""
    block = next(each.text for each in blocks_of(PAGE) if "class VectorStore" in each.text)
    assert len(block.splitlines()) <= 80
    folder = tmp_path_factory.mktemp("vectors")
    (folder / "toy_vectors.py").write_text(block)
    monkeypatch.syspath_prepend(str(folder))  # where child processes find it too
    module = importlib.import_module("toy_vectors")
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, module.VECTORS))
    yield
    del sys.modules["toy_vectors"]


def write(folder: Path, *counts: int) -> Path:
    """Files of so many vectors each, of the numbers 0, 1, 2, …"""
    folder.mkdir()
    numbers = iter(range(3 * sum(counts)))
    for number, count in enumerate(counts):
        rows = [np.array([next(numbers) for _ in range(3)], np.float32).tobytes() for _ in range(count)]
        (folder / f"{number}.fvecs").write_bytes(b"".join(b"\x03\0\0\0" + row for row in rows))
    return folder


def test_users_format_is_recognized_and_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", 3, 2)
    (folder / "README.md").write_text("# vectors")
    assert find_source(folder).format.name == "fvecs"
    samples = sp.open_dataset(folder)
    assert [sample.key for sample in samples] == ["0.fvecs:0", "0.fvecs:1", "0.fvecs:2", "1.fvecs:0", "1.fvecs:1"]
    assert np.frombuffer(samples[3]["vector"], np.float32).tolist() == [9, 10, 11]
    report = check_dataset(folder, processes=1)
    assert (report.samples, report.problems) == (5, [])
    with (folder / "1.fvecs").open("ab") as file:
        file.write(b"x")
    assert [entry.name for entry in index_any(folder, processes=1)[1]] == ["1.fvecs"]
    with pytest.raises(sp.ShardError, match=r"1\.fvecs: cut short"):
        sp.open_dataset(folder)


class Sums(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> tuple[str, float]:
        return sample.key, float(np.frombuffer(sample["vector"], np.float32).sum())


def test_pipeline_of_a_users_format_resumes_exactly(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", 20, 10)
    pipeline = sp.read(str(folder)).shuffle(8).encode(Sums()).batch(3)
    assert_exact_resume(partial(lambda chain: chain, pipeline)(), lanes=2, steps=4, workers=(0,), chains=1)

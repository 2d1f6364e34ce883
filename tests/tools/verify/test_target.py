"""What `savable verify-resume` takes on its command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from savable_pipeline.tools.verify.target import load_target


@pytest.fixture(autouse=True)
def search_path() -> Iterator[None]:
    """Restore the module path, to which a target adds its folder, for processes that tests start later."""
    before = [*sys.path]
    yield
    sys.path[:] = before


def test_loader_loader_function_and_pipeline_are_accepted(tmp_path: Path) -> None:
    made = load_target("tests.support.toy_impure:make_loader")
    assert (made.seed, made.lanes, made.num_workers) == (3, 2, 1)
    own = load_target("tests.support.toy_impure:good", seed=5, lanes=4)
    assert (own.seed, own.lanes) == (5, 4)
    (tmp_path / "own_train.py").write_text(
        "import savable_pipeline as sp\nfrom tests.support.toy_impure import good\n"
        "class Runs:\n    first = sp.SavableLoader(good, seed=9, lanes=6)\n"
    )
    assert load_target(f"{tmp_path}/own_train.py:Runs.first").seed == 9


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train", "expected module:name"),
        (":loader", "expected module:name"),
        ("gone:loader", "no module 'gone'"),
        ("gone.py:loader", r"gone\.py: no such file"),
        ("tests.support.toy_impure:gone", "no 'gone'; it has .*make_loader"),
        ("tests.support.toy_impure:number", "is a int: expected a SavableLoader"),
        ("tests.support.toy_impure:Toy", "is a type: expected a SavableLoader"),
        ("os:getpid", "returned a int. It must return a SavableLoader"),
        ("shutil:copyfile", "takes 2 arguments"),
    ],
)
def test_other_targets_are_rejected(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_target(target)


def test_seed_and_lanes_are_for_a_pipeline_only() -> None:
    with pytest.raises(ValueError, match="has its own seed and lanes"):
        load_target("tests.support.toy_impure:make_loader", seed=1)


def test_file_named_like_a_module_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "json.py").touch()
    with pytest.raises(ValueError, match=r"is imported already as .*Rename the file"):
        load_target(f"{tmp_path}/json.py:loader")

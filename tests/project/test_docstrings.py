"""Every public name has a docstring with an example, and the examples run.

An example is a block of Python in a docstring, fenced as in Markdown (```python). It runs in a folder with `shards/`
and `speech/` (tests/support/example_shards.py), and `sp` is imported. The comment behind an expression is its result,
or the error that it raises, in which `...` stands for anything:

    sp.Lane(1, 4).index      # 1
    sp.Lane(4, 4)            # ValueError: lane ...

An example in the form of doctest (>>>) runs where `shards/` has 400 numbered samples (`write_numbered_pictures`).
"""

from __future__ import annotations

import ast
import doctest
import inspect
import io
import re
import textwrap
import tokenize
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline
import savable_pipeline.testing
import task_encoders
from savable_pipeline import custom, errors
from savable_pipeline.trainers import (
    context_parallel,
    device,
    elastic,
    forms,
    loss_scale,
    micro_batches,
    model_inputs,
    trainer_loader,
)
from tests.support.example_shards import write_example_shards, write_example_speech, write_numbered_pictures

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_ERROR = re.compile(r"\w+Error\b")


def public_names() -> dict[str, Any]:
    """Public classes and functions by their full names."""
    testing = [name for name, value in vars(savable_pipeline.testing).items() if _is_own(value) and name[0] != "_"]
    # Those that import a trainer are tried in tests/trainers/adapters.py.
    modules: list[tuple[ModuleType, list[str]]] = [
        (savable_pipeline, savable_pipeline.__all__),
        (custom, custom.__all__),
        (errors, ["MediaError", "RemoteError", "StateError"]),
        (savable_pipeline.testing, testing),
        (task_encoders, task_encoders.__all__),
        (device, ["OnDevice"]),
        (loss_scale, ["loss_scale"]),
        (micro_batches, ["rows", "split", "micro_batches"]),
        (context_parallel, ["context_index", "cut_context", "join_context"]),
        (model_inputs, ["model_inputs"]),
        (elastic, ["complete_state"]),
        (trainer_loader, ["TrainerLoader"]),
        (forms, ["to_json", "from_json"]),
    ]
    found = {f"{module.__name__}.{name}": getattr(module, name) for module, names in modules for name in names}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isfunction(value)}


def _is_own(value: Any) -> bool:
    return getattr(value, "__module__", "") == savable_pipeline.testing.__name__


def examples(value: Any) -> list[str]:
    """The examples in the docstring of a function, or in those of a class and its methods."""
    members = list(vars(value).values()) if inspect.isclass(value) else []
    docstrings = [inspect.cleandoc(each.__doc__) for each in (value, *members) if isinstance(each.__doc__, str)]
    blocks = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.M)
    return [textwrap.dedent(block) for text in docstrings for _, block in blocks.findall(text)]


def doctests(name: str, value: Any) -> list[doctest.DocTest]:
    """The examples in the form of doctest, of a name and of its own methods."""
    names = {
        "__name__": "example",
        "sp": savable_pipeline,
        "custom": custom,
        "errors": errors,
        "np": np,
        "torch": torch,
        "Path": Path,
    }
    return [test for test in doctest.DocTestFinder().find(value, name, module=False, globs=names) if test.examples]


def run_example(code: str, name: str) -> int:
    """Run an example and compare its results with its comments. Returns the number of these."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    names: dict[str, Any] = {"__name__": "example", "sp": savable_pipeline, "custom": custom}
    compared = 0
    for statement in ast.parse(code).body:
        expected = comments.get(statement.end_lineno or 0)
        if not isinstance(statement, ast.Expr) or expected is None:
            exec(compile(ast.Module([statement], []), name, "exec"), names)
            continue
        found = _result(compile(ast.Expression(statement.value), name, "eval"), names, fails=_ERROR.match(expected))
        assert doctest.OutputChecker().check_output(expected, found, _FLAGS), f"{name}: {found}, not {expected}"
        compared += 1
    return compared


def _result(code: Any, names: dict[str, Any], *, fails: object) -> str:
    if not fails:
        return repr(eval(code, names))
    with pytest.raises(Exception) as raised:
        eval(code, names)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_example_shards(folder / "shards")
    write_example_speech(folder / "speech")
    return folder


BLOCKS = [(name, code) for name, value in public_names().items() for code in examples(value)]


@pytest.mark.parametrize(("name", "code"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_docstring_example_matches_its_comments(
    name: str, code: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run_example(code, f"the example of {name}") > 0, "an example shows a result"


@pytest.fixture(scope="module")
def numbered_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctests")
    write_numbered_pictures(folder / "shards")
    return folder


DOCTESTS = [test for name, value in public_names().items() for test in doctests(name, value)]


@pytest.mark.parametrize("test", DOCTESTS, ids=[test.name for test in DOCTESTS])
def test_doctest_prints_what_it_shows(
    test: doctest.DocTest, numbered_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(numbered_folder)
    printed: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=printed.append).failed, "".join(printed)


def test_every_public_name_has_a_docstring_with_an_example() -> None:
    names = public_names()
    assert [name for name, value in names.items() if not value.__doc__] == []
    assert [name for name, value in names.items() if not examples(value) and not doctests(name, value)] == []


@pytest.mark.parametrize("code", ["1 + 1  # 3", "1 / 0  # ValueError: ...", "len('ab')  # ZeroDivisionError"])
def test_an_example_whose_comment_is_wrong_fails(code: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_example(code, "wrong")


def test_only_comments_of_expressions_are_compared() -> None:
    assert run_example("x = [1,  # one\n  2]  # both\nx  # [1, 2]\nx[5]  # IndexError: list index ...\n", "right") == 2

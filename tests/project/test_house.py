"""The house rules that can be counted: one name one class, no private name of another file, nothing that is too long.

What is not so yet stands here by name. It may only become less: a name or a file that is mended need not be here.
"""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for package in ("savable_pipeline", "task_encoders") for path in sorted((ROOT / package).rglob("*.py"))]
LONGEST_CLASS, LONGEST_FUNCTION = 300, 40  # lines of code
STILL_LONGER = {  # functions, a little above what they have
    "packer.py:__init__": 48,
    "tar.py:members": 48,
    "conversion.py:convert": 49,
    "convert_command.py:convert_source": 88,
}
MEASURE = runpy.run_path(str(ROOT / "tools/house/measure.py"))
code_lines: Callable[[str], int] = MEASURE["code_lines"]
MOST_LINES = {  # of code, by folder: what the last change had reached; they only become fewer
    "savable_pipeline": 210,
    "savable_pipeline/core": 1313,
    "savable_pipeline/data": 13905,
    "savable_pipeline/run": 8141,
    "savable_pipeline/stages": 6588,
    "savable_pipeline/tools": 6225,
    "savable_pipeline/trainers": 2616,
    "task_encoders": 2479,
}
MOST_LINES_OF_TOOLS = 6115  # of the repository's own: quickstart, benchmarks, soaks, trials
MOST_BENCHMARKS = 10  # commands in tools/bench; the timer, the data and the other loaders are not
NO_COMMANDS = {"rounds.py", "data.py", "ours.py", "peers.py"}  # the last one is a program that the benchmarks start


def test_no_public_class_name_is_defined_twice() -> None:
    classes = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, times in classes.items() if times > 1} == set()


def test_no_file_reads_a_private_name_of_another() -> None:
    assert not [path.name for path in FILES if "noqa: SLF" in path.read_text()]


def test_no_class_and_no_function_is_too_long() -> None:
    too_long = {}
    for path in FILES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.name}:{node.name}"
                allowed = LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION
                body = source.splitlines()[node.lineno - 1 : node.end_lineno]
                if len(body) <= allowed:
                    continue
                lines = code_lines(textwrap.dedent("\n".join(body)))
                if lines > STILL_LONGER.get(name, allowed):
                    too_long[name] = lines
    assert not too_long


def test_no_folder_has_more_lines_of_code_than_before() -> None:
    found: dict[str, int] = MEASURE["lines_by_folder"]()
    assert found.keys() == MOST_LINES.keys()
    assert not {name: lines for name, lines in found.items() if lines > MOST_LINES[name]}


def test_tools_have_no_more_lines_of_code_than_before() -> None:
    assert sum(code_lines(path.read_text()) for path in (ROOT / "tools").rglob("*.py")) <= MOST_LINES_OF_TOOLS


def test_benchmarks_are_few_and_each_is_on_a_page() -> None:
    commands = {path.name for path in (ROOT / "tools/bench").rglob("*.py")} - NO_COMMANDS
    assert len(commands) <= MOST_BENCHMARKS
    assert commands == {name for name, _ in _benchmarks_on_pages()}


def test_benchmarks_named_on_pages_exist() -> None:
    """Such as `python tools/bench/workers.py scaling`: the file, and its word as its docstring has it."""
    for name, word in _benchmarks_on_pages():
        text = (ROOT / "tools/bench" / name).read_text()
        assert not word or f"python tools/bench/{name} {word} " in text.replace("\n", " "), f"{name} {word}"


def _benchmarks_on_pages() -> set[tuple[str, str]]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = [re.findall(r"`python tools/bench/(\w+\.py)(?: ([a-z][a-z-]*))?", page.read_text()) for page in pages]
    return {(name, word) for each in found for name, word in each}


MOST_ENTERED = {"a tar": 17, "Parquet": 18}  # files that `sp.open_dataset(p)[0]["json"]` enters; only fewer


def test_measure_counts_lines_files_and_import_walks(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "tools/house/measure.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "code lines of" in printed and f"{len(FILES)} files, " in printed
    entered = re.findall(r'sp\.open_dataset\(p\)\[0\]\["json"\] of (.*): (\d+) files', printed)
    assert {kind for kind, _ in entered} == MOST_ENTERED.keys()
    assert not {kind: files for kind, files in entered if int(files) > MOST_ENTERED[kind]}

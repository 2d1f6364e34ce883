"""Measure how simple the library is: its size, its layers, and the files that a call enters.

    python tools/house/measure.py

Code lines are lines with code, not docstrings, comments or blank lines. A walk is a call of the public API, such as
`sp.open_dataset(shards)[0]["json"]`. It enters each file of which a function runs. It climbs if a function calls one of
a higher layer. We call a layer a floor. The floors are the layers contracts in `pyproject.toml`, the lowest last.
"""

from __future__ import annotations

import ast
import io
import json
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import savable_pipeline as sp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("savable_pipeline", "task_encoders")


def code_lines(source: str) -> int:
    """Count the lines of code of a module."""
    texts = [text.strip() for text in source.split("\n")]
    lines = {number for number, text in enumerate(texts, 1) if text and text[0] != "#"}
    tree = ast.parse(source)
    docstrings = [node for node in _statements(tree) if isinstance(node, ast.Expr) and _is_text(node.value)]
    if source.count('"""') > 2 * len(docstrings):  # each line of another multi-line string counts
        texts_of_lines = (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) or _is_text(node))
        lines.update(line for node in texts_of_lines for line in _lines_of(node))
    return len(lines.difference(line for node in docstrings for line in _lines_of(node)))


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements nested in a node."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from _statements(each)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _lines_of(node: Any) -> range:
    """Return the numbers of the lines of a node."""
    return range(node.lineno, node.end_lineno + 1)


def lines_by_folder() -> dict[str, int]:
    """Count the code lines of each folder of the package, of files outside of folders, and of the encoders."""
    lines: dict[str, int] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            folder = path.relative_to(ROOT).parts[:-1][:2]
            name = "/".join(folder) if package == PACKAGES[0] else package
            lines[name] = lines.get(name, 0) + code_lines(path.read_text())
    return lines


def floors() -> list[str]:
    """Return the floors of the layers contracts, the lowest first, as prefixes of modules ("a|b" for several).

    A contract within a folder adds its floors after that folder.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {each["containers"][0]: each["layers"] for each in contracts if each["type"] == "layers"}

    def rows(container: str) -> list[str]:
        found: list[str] = []
        for layer in reversed(layers[container]):
            names = [f"{container}.{name.strip()}" for name in layer.split("|")]
            inner = [row for name in names if name in layers for row in rows(name)]
            found += ["|".join(names), *inner]
        return found

    return rows("savable_pipeline")


class Walk:
    """Files of the library that a call enters, and its climbs."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}  # files in the order in which they were entered
        self.climbs: dict[tuple[str, str], None] = {}
        self._floors = [row.split("|") for row in floors()]

    def record(self, call: Callable[[], Any]) -> Walk:
        """Run a call and record its walk."""
        sys.setprofile(self._profile)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or frame.f_code.co_name in ("<module>", "<listcomp>", "<genexpr>", "<lambda>"):
            return
        entered = _module(frame)
        if not entered.startswith("savable_pipeline."):
            return
        self.files[entered] = None
        caller = _module(frame.f_back)
        if caller.startswith("savable_pipeline.") and self._floor(caller) < self._floor(entered):
            self.climbs[caller, entered] = None

    def _floor(self, module: str) -> int:
        """Return the index of the innermost floor of a module."""
        return max((i for i, names in enumerate(self._floors) if _is_in(module, names)), default=len(self._floors))


def _is_in(module: str, names: list[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in names)


def _module(frame: FrameType | None) -> str:
    """Return the name of the module of a frame, or ""."""
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


def _write_tar(folder: Path) -> Path:
    """Write one shard with one sample to a folder, and return the folder."""
    data = json.dumps({"id": 0}).encode()
    with tarfile.open(folder / "shard.tar", "w") as tar:
        member = tarfile.TarInfo("s000.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    return folder


def _write_parquet(folder: Path) -> Path:
    """Write one Parquet file with one row to a folder, and return the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"json": ['{"id": 0}']}), folder / "part.parquet")
    return folder


def main() -> None:
    """Print all numbers."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    sources = [path.read_text() for path in files]
    print(f"{sum(map(code_lines, sources)):,} code lines of {sum(text.count(chr(10)) for text in sources):,}")
    print(", ".join(f"{name} {lines:,}" for name, lines in lines_by_folder().items()))
    print(f"{len(files)} files, {len(floors())} rows of floors, {sum(text.count('noqa: SLF') for text in sources)} SLF")
    for kind, make in {"a tar": _write_tar, "Parquet": _write_parquet}.items():
        with tempfile.TemporaryDirectory() as folder:
            _print_walk(kind, str(make(Path(folder))))


def _print_walk(kind: str, path: str) -> None:
    sp.open_dataset(path)[0]["json"]  # the first call also imports and indexes, which is no part of the walk
    walk = Walk().record(lambda: sp.open_dataset(path)[0]["json"])
    print(f'sp.open_dataset(p)[0]["json"] of {kind}: {len(walk.files)} files, {len(walk.climbs)} climbs')
    for module in walk.files:
        print(f"    {module}")
    for caller, entered in walk.climbs:
        print(f"    climbs from {caller} to {entered}")


if __name__ == "__main__":
    main()

"""A command shows each warning about a dataset once, in a terminal, where no handler of logging is configured."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.toy_files import write_captioned_images

LEFT_OUT, NOT_READ, PACKED = "1 file left out", "are not read beside", "compressed jsonl files are skipped"
COMMANDS = {
    "info": "info {source}",
    "check": "check {source}",
    "preview": "preview {source} -o {out}.html",
    "convert": "convert {source} {out}",
    "convert in processes": "convert {source} {out} --workers 2",
    "index": "index {source}",
    "plan": "plan {script}:pipeline",
}


def folder(source: Path) -> None:
    """Images, one of them without bytes, beside a table and an archive."""
    write_captioned_images(source, 4, **{"cut.jpg": b"", "labels.csv": b"a,b\n1,2\n", "more.zip": b"PK"})


def lines(source: Path) -> None:
    """JSONL beside a compressed one."""
    source.mkdir()
    (source / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (source / "b.jsonl.gz").write_bytes(gzip.compress(b'{"n": 3}\n'))


def shown(root: Path, command: str) -> str:
    """All that a command shows."""
    script = root / "script.py"
    script.write_text(f"import savable_pipeline as sp\n\npipeline = sp.read({str(root / 'in')!r}).map(len).batch(1)\n")
    words = command.format(source=root / "in", out=root / "out", script=script).split()
    environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "savable_pipeline.tools.cli.main", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout
    return " ".join(done.stdout.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_warnings_of_a_folder_are_shown_once(tmp_path: Path, command: str) -> None:
    folder(tmp_path / "in")
    text = shown(tmp_path, COMMANDS[command])
    assert text.count(NOT_READ) == 1
    if command.startswith(("check", "convert")):  # they list problems
        assert text.count("cut.jpg") == 1 and "empty file" in text
    elif command != "index":  # which reads no sample
        assert text.count(LEFT_OUT) == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_warning_of_a_compressed_file_is_shown_once(tmp_path: Path, command: str) -> None:
    lines(tmp_path / "in")
    assert shown(tmp_path, COMMANDS[command]).count(PACKED) == 1

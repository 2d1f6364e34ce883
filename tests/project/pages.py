"""The pages for people, as tests see them: their code blocks, and the folder in which these run.

A block starts with its language; a comment on the line above says why one is not run:

    ```python                       run, after the others of its page, in one namespace
    ```python title="train.py"      the same, and written to that file, as a block of any language is
    ```console                      `$ savable …`, `$ python FILE` and `$ torchrun …` are run, and print what is below
    <!-- not run: needs two nodes -->

Other languages (`text`, `sh`, `yaml`, `json`) are never run.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from typer.testing import CliRunner

from savable_pipeline.tools.cli.main import app
from tests.conftest import write_tar
from tests.support.example_shards import write_example_corpus, write_example_films, write_example_speech
from tests.support.toy_records import write_captioned_litdata, write_captioned_mds

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
RUN = ("python", "console")
_BLOCK = re.compile(
    r'^(?:<!-- not run: (?P<why>.+?) -->\n\n?)?```(?P<language>\S*)(?: title="(?P<title>.+?)")?\n(?P<text>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block of a page; `why` it is not run, if it is not."""

    place: str  # page and line
    language: str
    text: str
    title: str | None
    why: str | None

    @property
    def runs(self) -> bool:
        return self.why is None and (self.language in RUN or self.title is not None)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            f"{name_of(page)}, line {text[: found.start('language')].count(chr(10)) + 1}",
            found["language"],
            found["text"],
            found["title"],
            found["why"],
        )
        for found in _BLOCK.finditer(text)
    ]


def run_blocks(blocks: list[Block], names: dict[str, Any]) -> None:
    """Run these blocks one after the other in the current folder."""
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.text)
        if block.language == "python":
            exec(compile(block.text, block.place, "exec"), names)
        elif block.language == "console":
            _run_commands(block)


def _run_commands(block: Block) -> None:
    """Run the commands of a block. What stands below one must be what it prints; `…` there is any text."""
    for program, command, expected in re.findall(
        r"^\$ (savable|python|torchrun) (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE
    ):
        if program == "savable":
            printed = _printed_by_savable(command, block, expected)
        else:
            printed = _printed_by_file(command) if program == "python" else _printed_by_ranks(command)
        pattern = ".*".join(map(re.escape, expected.rstrip().split("…")))
        found = printed.rstrip() if expected else ""
        assert re.fullmatch(pattern, found, re.DOTALL), f"{block.place}: {command} printed\n{printed}"


def _printed_by_savable(command: str, block: Block, expected: str) -> str:
    result = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    if not expected:
        assert result.exit_code == 0, f"{block.place}: {command}: {result.output}"
    return result.stdout


def _printed_by_file(path: str) -> str:
    """What a file prints that is started as a program; in this process, which has imported torch already."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def _printed_by_ranks(command: str) -> str:
    """What torchrun's ranks print."""
    found = re.fullmatch(r"--nproc-per-node (\d+) (.+)", command)
    assert found, f"torchrun with other options: {command}"
    ranks = ["tests.support.forked_ranks", "tests.support.script_rank", found[1]]
    run = subprocess.run(
        [sys.executable, "-m", *ranks, *shlex.split(found[2])],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, 7, 7)).save(file, "PNG")
    return file.getvalue()


def write_captioned_shards(folder: Path) -> None:
    """400 pictures with captions in 4 shards."""
    for shard in range(4):
        members = []
        for i in range(100):
            name = f"{shard}_{i:04d}"
            members += [(f"{name}.png", png(i)), (f"{name}.txt", f"picture {i} of shard {shard}".encode())]
        write_tar(folder / f"{shard}.tar", members)


def write_files(folder: Path) -> None:
    """Six photos with captions, another that is broken, records that name the six; MDS, LitData, speech and films."""
    (folder / "photos").mkdir()
    for i in range(6):
        (folder / f"photos/{i:03}.png").write_bytes(png(i))
        (folder / f"photos/{i:03}.txt").write_text(f"photo {i}")
    (folder / "photos/broken.png").write_bytes(b"no picture")
    lines = [{"image": f"photos/{i:03}.png", "caption": f"photo {i}"} for i in range(6)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "captions.jsonl").write_text(text)
    (folder / "captions.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    chats = [{"id": f"chat{i}", "image": f"photos/{i % 3:03}.png", "conversations": []} for i in range(6)]
    (folder / "llava.json").write_text(json.dumps(chats, indent=1))
    rows = "".join(f"photos/{i:03}.png,photo {i}\n" for i in range(6))
    (folder / "captions.csv").write_text(f"path,caption\n{rows}")
    write_captioned_mds(folder / "mds")
    write_captioned_litdata(folder / "litdata")
    write_example_speech(folder / "speech")
    write_example_films(folder / "films")
    write_example_corpus(folder / "corpus")

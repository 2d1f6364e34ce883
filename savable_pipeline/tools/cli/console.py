"""What commands share: consoles, text of data as a terminal may see it, errors as lines, and how far a command is."""

from __future__ import annotations

import contextlib
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from savable_pipeline.core.wording import clean_address, counted, human_bytes
from savable_pipeline.errors import SavableError
from savable_pipeline.tools.convert import FILE_FIELDS

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # controls, what turns the direction of text, lone surrogates, ends of lines


def console(*, stderr: bool = False) -> Console:
    """A console that takes no word between colons for a picture: `train.py:train: …` holds one."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


out = console()  # results
err = console(stderr=True)  # progress and errors


def printable(text: str) -> str:
    """Text of anywhere, for a console: without markup, and what a terminal would obey as escapes, such as `\\\\x1b`."""
    return escape(visible(text))


def visible(text: str) -> str:
    """Text of anywhere for what knows no markup: what a terminal would obey as escapes."""
    return "".join(map(_seen, text))


def _seen(character: str) -> str:
    if unicodedata.category(character) not in _UNSEEN:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def print_counts(console: Console, word: str, counts: Mapping[str, int], some: str = "") -> None:
    """In how many samples each of these parts is `word`, in one line; nothing where none is."""
    there = [f"{name} in {counted(count, 'sample')}" for name, count in counts.items() if count]
    if there:
        console.print(printable(f"{word}: {', '.join(there)}{some}"))


def print_warnings(console: Console, warnings: list[str]) -> None:
    """Each warning on a line."""
    for warning in warnings:
        console.print(printable(f"warning: {warning}"))


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print an error of the library, or Ctrl-C, as one line on stderr."""
    try:
        yield
    except (SavableError, ValueError, OSError, ImportError) as error:
        line = clean_address(" ".join(str(error).split()))
        err.print(f"[bold red]error:[/] {printable(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None


def check_output(*paths: Path | None) -> None:
    """Raises ValueError, before any work is done, for a file that could not be written: its folder is missing."""
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; expected a name for a file, such as {path / 'page.html'}")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent} to write it into; make it, or name another")


Progress: TypeAlias = Callable[..., None]  # of the things done, of all, and of the bytes done if they are known
TargetArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="module:name or file.py:name of a SavableLoader, a function that makes one, or a pipeline function.",
    ),
]
# What says how data are read: of `convert`, `info`, `check` and `preview`.
KeyEndOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--key-end",
        metavar="first|last",
        help="The dot of a file's name that ends the key; in tars, dots before it become _. Default: the first, unless "
        "that seems to merge samples.",
    ),
]
ClassesOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--classes",
        help="Folder: the name of a sample's top folder becomes its part cls, a number; in convert, names are in "
        "classes.json.",
    ),
]
ClassesFromOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--classes-from", help="As --classes, numbered as in this folder, or in this file of names."),
]
KeyFieldOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--key-field", help="Records: the field with a sample's key. Default: the number of its record."),
]
FileFieldOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--file-field",
        metavar="FIELD[=PART]",
        help=f"JSONL, JSON, CSV: a field that names a file; repeatable. Default: {', '.join(FILE_FIELDS)}; in CSV "
        "also columns of files that are there.",
    ),
]
FilesFromOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--files-from",
        help="JSONL, JSON, CSV: the folder of the files. Default: that of SRC. Parquet, Arrow: the folder in which "
        "the files are that rows name by a path, without their bytes.",
    ),
]
_LINE_EVERY_S = 10.0


@contextlib.contextmanager
def progress_of(console: Console, before: str, things: str, during: str = "") -> Iterator[Progress]:
    """A function of the number of samples done, of all of them, and of their bytes: it shows a bar, or lines.

    `before` is printed at once; `during` (by default the same) as soon as the number of things is known.
    """
    during = during or before
    if not console.is_terminal:
        console.print(printable(before))
        yield _Lines(console, f"{during}: {{:,}} of {{:,}} {things}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}", markup=False)
    with Progress(*columns, rate, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(visible(before), total=None, rate="")
        speed = _Rate()

        def update(done: int, total: int, size: int = 0) -> None:
            bar.update(task, description=visible(during), completed=done, total=total, rate=speed.text(done, size))

        yield update


class _Rate:
    """Things and bytes a second, since the first call."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._before = 0

    def text(self, done: int, size: int) -> str:
        """`1,204/s, 45.1 MB, 9.3 MB/s`; without the bytes where they are not known."""
        now = time.monotonic()
        if not self._begin:
            self._begin, self._before = now, done
            return ""
        seconds = max(now - self._begin, 1e-9)
        things = f"{(done - self._before) / seconds:,.0f}/s"
        return f"{things}, {human_bytes(size)}, {human_bytes(size / seconds)}/s" if size else things


class _Lines:
    """Progress in plain lines: the first, the last, and one every ten seconds between."""

    def __init__(self, console: Console, line: str) -> None:
        self._console = console
        self._line = line
        self._rate = _Rate()
        self._next = 0.0

    def __call__(self, done: int, total: int, size: int = 0) -> None:
        now = time.monotonic()
        if now >= self._next or done == total:
            rate = self._rate.text(done, size)
            shown = f" ({rate})" if rate and done < total else ""
            self._console.print(self._line.format(done, total) + shown)
            self._next = now + _LINE_EVERY_S

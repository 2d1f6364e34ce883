"""Helpers of commands: consoles, errors as lines, progress, common options."""

from __future__ import annotations

import contextlib
import logging
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from savable_pipeline.core.wording import clean_address, counted, human_bytes
from savable_pipeline.errors import SavableError

# Unicode categories: controls, changes of text direction, lone surrogates, line ends
_INVISIBLE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")


def console(*, stderr: bool = False) -> Console:
    """Create a console that does not replace `:word:` by an emoji.

    `train.py:train: …` contains one.
    """
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False)


out = console()  # results
err = console(stderr=True)  # progress and errors


def escape_markup(text: str) -> str:
    """Escape rich's markup, and characters that control a terminal, such as `\\x1b`."""
    return escape(escape_controls(text))


def escape_controls(text: str) -> str:
    """Escape characters that control a terminal, but not rich's markup."""
    return "".join(map(_escape_control, text))


def _escape_control(character: str) -> str:
    """Return a character, or its escape sequence if a terminal would not show the character."""
    if unicodedata.category(character) not in _INVISIBLE_CATEGORIES:
        return character
    return character.encode("unicode_escape", "backslashreplace").decode()


def print_counts(console: Console, word: str, counts: Mapping[str, int], scope: str = "") -> None:
    """Print one line: in how many samples each part is `word`, such as "empty".

    The line ends with `scope`.

    Nothing is printed if all counts are 0.
    """
    lines = [f"{name} in {counted(count, 'sample')}" for name, count in counts.items() if count]
    if lines:
        console.print(escape_markup(f"{word}: {', '.join(lines)}{scope}"))


_logged = set[str]()  # messages that `log_once` has shown


def _is_new(record: logging.LogRecord) -> bool:
    """Return whether a message is logged for the first time."""
    message = record.getMessage()
    is_new = message not in _logged
    _logged.add(message)
    return is_new


def log_once() -> None:
    """Show each log message once, although a command may open a dataset several times.

    This does not change handlers of the user's code.
    """
    logging.lastResort.addFilter(_is_new)  # type: ignore[union-attr]  # it is None only if a program changed it


def print_warnings(console: Console, warnings: list[str]) -> None:
    """Print each warning on a line, unless `log_once` has shown it."""
    for warning in (each for each in warnings if each not in _logged):
        console.print(escape_markup(f"warning: {warning}"))


@contextlib.contextmanager
def errors_as_lines() -> Iterator[None]:
    """Print an error of the library, or Ctrl-C, as one line on stderr."""
    try:
        yield
    except (SavableError, ValueError, OSError, ImportError) as error:
        line = clean_address(" ".join(str(error).split()))
        err.print(f"[bold red]error:[/] {escape_markup(line)}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("stopped")
        raise typer.Exit(130) from None


def exit_failed(reason: str, *, as_json: bool = False) -> NoReturn:
    """Exit with code 1. The reason is printed first, unless the output is JSON."""
    if not as_json:
        out.print(f"[bold red]FAILED:[/] {escape_markup(reason)}")
    raise typer.Exit(1)


def check_output(*paths: Path | None) -> None:
    """Raise ValueError for an output file that cannot be created.

    Either it is a folder, or its folder does not exist.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; expected a name for a file, such as {path / 'page.html'}")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}. Create it, or pass another path")


_SIZE = re.compile(r"(-?[0-9_]*[.]?[0-9]+) ?(?:([kmgt](i)?)?b)?", re.IGNORECASE)


def byte_count(size: str) -> int:
    """Return the number of bytes of a size: `256000000`, `256MB` or `1.5 GiB`."""
    if (found := _SIZE.fullmatch(size)) is None:
        raise ValueError(f"no size: {size!r}. Pass bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    number, prefix, binary = found.groups("")
    return int(Decimal(number) * (1024 if binary else 1000) ** " kmgt".index(prefix[:1].lower() or " "))


ShowProgress: TypeAlias = Callable[..., None]  # its arguments: things done, all things, and bytes done if known
TargetArgument: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A loader, a function that builds one, or a pipeline: file.py:name or module:name."
    ),
]
# Options are grouped in these panels of `--help`.
input_option = partial(typer.Option, rich_help_panel="Input")
output_option = partial(typer.Option, rich_help_panel="Output")
parallel_option = partial(typer.Option, rich_help_panel="Parallelism")
# These options of `convert`, `info`, `check` and `preview` say how data is read.
KeyEndOption: TypeAlias = Annotated[
    str | None, input_option("--key-end", metavar="first|last", help="The dot of a file name that ends its key.")
]
ClassesOption: TypeAlias = Annotated[
    bool, input_option("--classes", help="Folders: number the top folders as part cls.")
]
ClassesFromOption: TypeAlias = Annotated[
    Path | None, input_option("--classes-from", help="As --classes, numbered as in this folder or file.")
]
KeyFieldOption: TypeAlias = Annotated[
    str | None, input_option("--key-field", help="Records: the field with the key of a sample.")
]
FileFieldOption: TypeAlias = Annotated[
    list[str] | None,
    input_option("--file-field", metavar="FIELD[=PART]", help="Records: a field that names a file (repeatable)."),
]
FilesFromOption: TypeAlias = Annotated[
    Path | None, input_option("--files-from", help="Records: the folder of the files that they name.")
]
WorkersOption: TypeAlias = Annotated[int | None, parallel_option("--workers", help="Processes. Default: one per core.")]
JsonOption: TypeAlias = Annotated[bool, output_option("--json", help="Print one JSON object.")]
SeedOption: TypeAlias = Annotated[int | None, input_option("--seed", help="Pipelines: the seed. Default: 0.")]
_LINE_EVERY_S = 10.0  # seconds between two lines of progress


@contextlib.contextmanager
def progress_shown(console: Console, first_text: str, things: str, later_text: str = "") -> Iterator[ShowProgress]:
    """Yield a function that shows progress.

    It draws a bar on a terminal, and otherwise prints a line every ten seconds.

    `things` names what is counted, such as "samples". `first_text` is shown until their number is known, and
    `later_text` from then on. "" (default): the same text.
    """
    text = later_text or first_text
    if not console.is_terminal:
        yield _ProgressLines(console, f"{text}: {{:,}} of {{:,}} {things}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    rate = TextColumn("{task.fields[rate]}", markup=False)
    with Progress(*columns, rate, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task(escape_controls(first_text), total=None, rate="")
        speed = _Rate()

        def update(done: int, total: int, size: int = 0) -> None:
            bar.update(
                task, description=escape_controls(text), completed=done, total=total, rate=speed.text(done, size)
            )

        yield update


class _Rate:
    """Formats the number of things and bytes per second since its first call."""

    def __init__(self) -> None:
        self._start_s = 0.0
        self._start_count = 0

    def text(self, done: int, size: int) -> str:
        """Format the rate: `1,204/s, 45.1 MB, 9.3 MB/s`, or without bytes if `size` is 0."""
        now = time.monotonic()
        if not self._start_s:
            self._start_s, self._start_count = now, done
            return ""
        seconds = max(now - self._start_s, 1e-9)
        rate = (done - self._start_count) / seconds
        things = f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s" if done > self._start_count else ""
        return f"{things}, {human_bytes(size)}, {human_bytes(size / seconds)}/s" if size and things else things


class _ProgressLines:
    """Prints progress as a plain line every ten seconds. A short job prints none."""

    def __init__(self, console: Console, line: str) -> None:
        self._console = console
        self._line = line
        self._rate = _Rate()
        self._next_line_s = time.monotonic() + _LINE_EVERY_S

    def __call__(self, done: int, total: int, size: int = 0) -> None:
        rate, now = self._rate.text(done, size), time.monotonic()
        if now >= self._next_line_s:
            self._console.print(escape_markup(self._line.format(done, total) + (f" ({rate})" if rate else "")))
            self._next_line_s = now + _LINE_EVERY_S

"""What the command prints of names and keys is text: no escape sequence reaches the terminal, and no emoji is made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from savable_pipeline.tools.cli.console import byte_count, console, escape_markup, progress_shown
from savable_pipeline.tools.cli.main import app
from tests.conftest import write_tar

EVIL = "k\x1b[31m\x07\x9b2J\u202e:train:[bold]"
SEEN = "k\\x1b[31m\\x07\\x9b2J\\u202e:train:[bold]"


@pytest.fixture
def hostile_dataset(tmp_path: Path) -> Path:
    """Write a shard, an image and a caption with such names and keys. Both parts are malformed."""
    folder = tmp_path / f"{EVIL}.d"
    write_tar(
        folder / f"{EVIL}.tar", [(f"{EVIL}.png", b"no image"), (f"{EVIL}.txt", b"\xff"), (f"{EVIL}.{EVIL}", b"x")]
    )
    return folder


@pytest.mark.parametrize(
    ("command", "as_json"), [("info", False), ("info", True), ("check", False), ("check", True), ("index", False)]
)
def test_no_escape_sequence_of_a_name_reaches_the_terminal(hostile_dataset: Path, command: str, as_json: bool) -> None:
    run = CliRunner().invoke(app, [command, str(hostile_dataset), *(["--json"] if as_json else [])])
    assert run.exit_code == (1 if command == "check" else 0), run.output
    for part in ("\x1b", "\x07", "\x9b", "\u202e", "\N{TRAIN}"):
        assert part not in run.output
    if as_json:
        assert EVIL in str(json.loads(run.stdout)) or repr(EVIL)[1:-1] in str(json.loads(run.stdout))
    else:
        assert SEEN in run.output.replace("\n", "")


def test_an_error_shows_a_name_as_text(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["info", str(tmp_path / EVIL)])
    assert run.exit_code == 2 and SEEN in run.output and "\x1b" not in run.output


def test_word_between_colons_is_not_an_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console().print(f"{escape_markup('train.py:train: equal')}")
    assert capsys.readouterr().out == "train.py:train: equal\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_the_target_as_the_user_wrote_it(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("savable_pipeline.tools.cli.console._LINE_EVERY_S", 0.0)
    shown = io.StringIO()
    on = Console(file=shown, force_terminal=terminal, emoji=False, width=200, color_system=None)
    with progress_shown(on, "importing train.py:train: [bold]\x07", "batches") as progress:
        progress(1, 2)
    assert "importing train.py:train: [bold]\\x07" in shown.getvalue()


def test_lone_surrogates_and_line_ends_are_escaped() -> None:
    assert escape_markup("a\udcff\n\u2028b é 猫") == "a\\udcff\\n\\u2028b é 猫"


def test_a_preview_names_its_page_as_text(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(data := io.BytesIO(), "PNG")
    write_tar(tmp_path / "x.tar", [("k.png", data.getvalue())])
    run = CliRunner().invoke(app, ["preview", str(tmp_path), "-o", str(tmp_path / "a:train:.html")])
    assert run.exit_code == 0 and "a:train:.html" in run.output


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("7", 7),
        ("1_000", 1000),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1.5 mb", 1_500_000),
        ("2TiB", 2 << 40),
        ("0.5gb", 5 * 10**8),
    ],
)
def test_a_size_may_have_a_unit(size: str, count: int) -> None:
    assert byte_count(size) == count


@pytest.mark.parametrize("size", ["", "MB", "1G", "1iB", "1 000", "1e9", "nan", "١", "1_", "_", "."])
def test_other_sizes_are_errors_that_name_the_units(size: str) -> None:
    with pytest.raises(
        ValueError, match=r"no size: .*Pass bytes, or a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
    ):
        byte_count(size)

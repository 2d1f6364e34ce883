"""README and Start: the recipe resumes exactly, commands stand where they are looked for, nothing stands in both."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.tools.cli.main import app
from tests.project.pages import README, ROOT, blocks_of, png, write_captioned_shards

START = ROOT / "docs/index.md"


@pytest.fixture(autouse=True)
def folder_with_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_captioned_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)


def test_recipe_resumed_from_its_checkpoint_yields_the_same_batches() -> None:
    whole: list[str] = []
    _train(lambda step, batch: whole.append(digest(batch)), num_workers=0)
    assert len(whole) == 30
    Path("checkpoint.pt").unlink()

    parts: dict[int, str] = {}

    def killed_at_25(step: int, batch: Any) -> None:
        if step == 25:
            raise KeyboardInterrupt
        parts[step] = digest(batch)

    with pytest.raises(KeyboardInterrupt):
        _train(killed_at_25)
    for step in range(20, 25):  # the last checkpoint was after 20 steps
        del parts[step]
    _train(lambda step, batch: parts.update({step: digest(batch)}), num_workers=0)
    assert list(parts) == list(range(50))
    assert list(parts.values())[:30] == whole


@pytest.mark.landing
def test_recipe_in_a_file_runs_twice_and_previews_without_training() -> None:
    Path("train.py").write_text(_recipe())
    with contextlib.redirect_stdout(io.StringIO()) as first:
        runpy.run_path("train.py", run_name="__main__")
    second = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True)
    steps = [line.split()[0] for line in (first.getvalue() + second.stdout).splitlines()]
    assert steps == [str(step) for step in range(60)]
    assert "torch.Size([4, " in second.stdout
    assert second.stderr == ""

    saved = Path("checkpoint.pt").read_bytes()
    shown = CliRunner().invoke(app, ["preview", "train.py:pipeline", "--batches", "1"], catch_exceptions=False)
    assert shown.exit_code == 0 and "torch.Size" not in shown.output
    assert Path("preview.html").exists() and Path("checkpoint.pt").read_bytes() == saved


def _recipe() -> str:
    (recipe,) = (block.text for block in blocks_of(START) if block.title == "train.py")
    return recipe


def _train(train_step: Callable[[int, Any], None], num_workers: int | None = None) -> None:
    """Run the recipe, with `train_step(step, batch)` in the place of the line that prints."""
    code, replaced = re.subn(r"print\(step, .*\)  # here your model trains", "train_step(step, batch)", _recipe())
    assert replaced == 1
    if num_workers is not None:
        code, replaced = re.subn(r"num_workers=\d+", f"num_workers={num_workers}", code)
        assert replaced == 1
    exec(code, {"train_step": train_step, "__name__": "__main__"})


def test_readme_commands_are_where_readers_and_tests_expect_them() -> None:
    text = README.read_text()
    ends = {
        "First minute": "tools/quickstart/first_minute.py",
        "Quickstart": "tools/quickstart/quickstart.py",
        "Tests": "-m pytest -n auto",
    }
    for heading, end in ends.items():
        block = re.search(rf"^## {heading}\n+```\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
        assert block and block[1].endswith(end) and "\n" not in block[1], heading


def test_readme_is_short_and_its_links_are_valid() -> None:
    text = README.read_text()
    assert text.count("\n") <= 165
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert START.relative_to(ROOT).as_posix() in links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_sample_of_readme_runs_as_pasted_and_resumes_with_the_same_batches() -> None:
    Path("photos").mkdir()
    for number in range(300):
        Path(f"photos/{number:03}.jpg").write_bytes(png(number))
        Path(f"photos/{number:03}.txt").write_text(f"photo {number}")
    Path("photos/017.jpg").write_bytes(b"broken")
    (sample,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    printed = []
    for steps in (20, 20, 40):  # two runs of 20 steps, then one of 40 that starts again
        if steps == 40:
            Path("data.pt").unlink()
        run, changed = re.subn(r"range\(20\)", f"range({steps})", sample.replace("num_workers=4", "num_workers=0"))
        assert changed == 1
        digests: list[str] = []
        run, changed = re.subn(r"print\(step.*\)", "save_digest(batch)", run)
        assert changed == 1
        exec(run, {"__name__": "__main__", "save_digest": lambda batch: digests.append(digest(batch))})  # noqa: B023
        printed.append(digests)
    assert len(printed[2]) == 40 and printed[0] + printed[1] == printed[2]


def test_readme_and_start_page_do_not_repeat_each_other() -> None:
    """No eight words in a row are in both, in prose and tables, whatever the marks between them."""
    prose = [re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in (README, START)]
    readme, start = (_runs_of_words(text, 8) for text in prose)
    assert not [" ".join(words) for words in readme & start]
    assert _runs_of_words("a b c d e f g h i", 8) & _runs_of_words("say: b c d **e** f g, h i", 8), (
        "so it would be found"
    )


def _runs_of_words(text: str, length: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + length]) for start in range(len(words) - length + 1)}

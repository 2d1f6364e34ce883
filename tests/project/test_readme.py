"""README: its recipe resumes exactly, its commands stand where they are looked for, and it is short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from savable_pipeline.stages.batch_difference import digest
from tests.project.pages import README, ROOT, blocks_of, write_captioned_shards


@pytest.fixture(autouse=True)
def folder_with_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_captioned_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)


def test_its_recipe_resumed_from_its_own_checkpoint_goes_on_with_the_same_batches() -> None:
    (recipe,) = (block.text for block in blocks_of(README) if block.runs)
    whole: list[str] = []
    exec(recipe, {"train_step": lambda batch: whole.append(digest(batch)), "__name__": "readme"})
    assert len(whole) == 30
    Path("checkpoint.pt").unlink()

    parts: list[str] = []

    def killed_at_25(batch: Any) -> None:
        if len(parts) == 25:
            raise KeyboardInterrupt
        parts.append(digest(batch))

    with pytest.raises(KeyboardInterrupt):
        exec(recipe, {"train_step": killed_at_25, "__name__": "readme"})
    del parts[20:]  # the last checkpoint was after 20 steps
    exec(recipe, {"train_step": lambda batch: parts.append(digest(batch)), "__name__": "readme"})
    assert parts == whole


def test_its_commands_stand_where_newcomers_and_tests_look_for_them() -> None:
    text = README.read_text()
    for heading, end in [("Quickstart", "tools/quickstart.py"), ("Tests", "-m pytest -n 2")]:
        block = re.search(rf"^## {heading}\n+```\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
        assert block and block[1].endswith(end) and "\n" not in block[1], heading


def test_it_is_read_in_three_minutes_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert text.count("\n") <= 150
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]

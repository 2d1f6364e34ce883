"""The page that lists the folders of the library names those that the contract of its floors names, in their order."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_table_of_folders_equals_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    floors = next(each["layers"] for each in contracts if each["type"] == "layers")
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", page.partition("| folder | content |")[2], re.MULTILINE)[
        : len(floors)
    ]
    assert [re.findall(r"`(\w+)`", names) for names, _ in rows] == [floor.split(" | ") for floor in floors]
    inside = {folder.name for folder in (ROOT / "savable_pipeline").glob("*/*/") if folder.name != "__pycache__"}
    assert {name for _, text in rows for name in re.findall(r"`(\w+)`", text)} == inside

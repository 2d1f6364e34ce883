"""The README's Python runs as written."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from savable_pipeline.compare import digest
from tests.conftest import write_tar

README = Path(__file__).parent.parent / "README.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


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


def test_its_python_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_captioned_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    names: dict[str, Any] = {"train_step": seen.append, "__name__": "readme"}
    blocks = python_blocks()
    assert len(blocks) >= 4
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, block {number}", "exec"), names)
    assert len(seen) == 50
    assert seen[0]["tokens"].shape[0] == 4


def test_its_recipe_resumed_from_its_own_checkpoint_goes_on_with_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_captioned_shards(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    recipe = python_blocks()[0]
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

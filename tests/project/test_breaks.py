"""The deliberate breaks that measure the suite can all be made in the code as it is now."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
BREAKS = runpy.run_path(str(ROOT / "tests/breaks/breaks.py"), run_name="breaks")["BREAKS"]


def test_there_are_breaks_of_stages_run_and_data() -> None:
    assert len(BREAKS) == len({each.name for each in BREAKS}) == 70
    for folder in ("stages", "run", "data"):
        assert sum(each.file.startswith(f"savable_pipeline/{folder}/") for each in BREAKS) >= 18


def test_each_edit_fits_the_code_once_and_leaves_it_python() -> None:
    for each in BREAKS:
        source = (ROOT / each.file).read_text()
        assert source.count(each.old) == 1, each.name
        broken = source.replace(each.old, each.new)
        assert broken != source, each.name
        compile(broken, each.file, "exec")

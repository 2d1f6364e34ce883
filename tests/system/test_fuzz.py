"""Some of the hostile inputs that `tools/soak/soak.py fuzz` tries by the thousand."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz import fuzz


@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.long)])
def test_random_changes_of_states_indexes_tars_and_yaml_are_rejected_or_read(tmp_path: Path, count: int) -> None:
    rows = list(fuzz(tmp_path, count))
    assert [row.case for row in rows] == ["state", "index", "tar", "YAML"]
    assert not [row for row in rows if row.problem]
    assert all(0 < int(row.compared.split()[0]) < count for row in rows)  # some rejected, some read

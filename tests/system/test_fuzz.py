"""Some hundred of the hostile inputs that `tools/soak/soak.py fuzz` tries by the thousand."""

from __future__ import annotations

from pathlib import Path

from fuzz import fuzz


def test_hostile_states_indexes_tars_and_yaml_are_refused_with_a_word_or_read(tmp_path: Path) -> None:
    rows = list(fuzz(tmp_path, 200))
    assert [row.case for row in rows] == ["state", "index", "tar", "YAML"]
    assert not [row for row in rows if row.wrong]
    assert all(0 < int(row.compared.split()[0]) < 200 for row in rows)  # some refused, some read

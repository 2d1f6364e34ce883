"""Numbers of a scan: their temporary file is closed with them."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import pytest

from savable_pipeline.data.shards.number_spool import NumberSpool


@pytest.mark.parametrize("count", [3, 1 << 18])
def test_temporary_file_is_closed_with_its_spool_and_arrays_stay(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", errors.append)  # a file that closes itself would warn
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        spool = NumberSpool()
        spool.write(np.arange(count))
        numbers, repeated = spool.numbers(), [*spool.repeated()]
        del spool
    assert not errors and not repeated
    assert numbers.sum() == count * (count - 1) // 2

"""Finds samples in a ledger by their keys."""

from __future__ import annotations

from collections.abc import Iterable

from savable_pipeline.dataset.dataset import Dataset
from savable_pipeline.dataset.kinds import open_any
from savable_pipeline.errors import SavableError
from savable_pipeline.ledger.reader import GivenBatch, Ledger
from savable_pipeline.ledger.records import Source

Found = list[tuple[str, GivenBatch]]


def find_keys(
    ledger: Ledger, keys: Iterable[str], *, source: str | None = None, data: str | None = None
) -> dict[str, Found]:
    """Each key's source and batch for each time that a sample with it was given.

    `source` restricts that to one source of a `Blend`; `data` says where its samples lie now. Raises `SavableError` for
    an unknown source, or if the data are not where the run read them.
    """
    found: dict[str, Found] = {key: [] for key in keys}
    for each in _chosen(ledger, source, data):
        indices = _indices(open_any(data or each.address), found)
        for index, given in ledger.find(each.tag, set(indices)):
            found[indices[index]].append((each.name, given))
    return found


def _chosen(ledger: Ledger, source: str | None, data: str | None) -> list[Source]:
    names = [each.name for each in ledger.sources]
    if source is not None and source not in names:
        raise SavableError(f"{ledger.folder}: no source {source!r}; the run had {', '.join(names)}")
    chosen = [each for each in ledger.sources if source in (None, each.name)]
    if data is not None and len(chosen) > 1:
        raise SavableError(f"--data is of one source: give --source too, one of {', '.join(names)}")
    return chosen


def _indices(dataset: Dataset, keys: Iterable[str]) -> dict[int, str]:
    """The numbers of the samples with these keys, by reading the key of every sample."""
    wanted = set(keys)
    return {index: key for index, key in enumerate(dataset.all_keys()) if key in wanted}

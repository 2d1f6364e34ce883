"""Finds samples in a ledger by their keys, in the data opened as the run opened them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import dataset_of, open_store
from savable_pipeline.data.dataset.shard_digests import begin_with, difference
from savable_pipeline.data.shards.paths import Shards, commits_of
from savable_pipeline.data.stores.source import STORES
from savable_pipeline.errors import SavableError
from savable_pipeline.run.ledger.reader import GivenBatch, LedgerFiles
from savable_pipeline.run.ledger.records import LedgerSource
from savable_pipeline.run.state.fingerprint import unpack_fingerprint
from savable_pipeline.stages.readers.readers import READERS

Found = list[tuple[str, GivenBatch, int]]
_KINDS = {reader.__name__: kind for kind, reader in READERS.items()}
_SHARDS = ".shards"  # the setting in a fingerprint that each reader has


def find_keys(
    ledger: LedgerFiles, keys: Iterable[str], *, source: str | None = None, data: str | None = None
) -> dict[str, Found | None]:
    """Each key's source, batch and rows there for each time that a sample with it was given; None if none has the key.

    `source` restricts that to one source of a `Blend`; `data` says where its samples are now. Raises `SavableError` for
    an unknown source, and if the data cannot be opened as the run opened them, or are not those that it read.
    """
    found: dict[str, Found | None] = dict.fromkeys(keys)
    for each in _chosen(ledger, source, data):
        indices = _indices(_dataset(ledger, each, data), found)
        found |= {key: found[key] or [] for key in indices.values()}
        for index, given, rows in ledger.find(each.tag, set(indices)):
            found[indices[index]] = [*(found[indices[index]] or []), (each.name, given, rows)]
    return found


def _chosen(ledger: LedgerFiles, source: str | None, data: str | None) -> list[LedgerSource]:
    names = [each.name for each in ledger.sources]
    if source is not None and source not in names:
        raise SavableError(f"{ledger.folder}: no source {source!r}; the run had {', '.join(names)}")
    chosen = [each for each in ledger.sources if source in (None, each.name)]
    if data is not None and len(chosen) > 1:
        raise SavableError(f"--data is of one source: give --source too, one of {', '.join(names)}")
    return chosen


def _dataset(ledger: LedgerFiles, source: LedgerSource, data: str | None) -> Dataset:
    """The samples of a source, numbered as in the run's last start that had it, and keyed as there.

    Raises `SavableError` if they cannot be opened so, or are others: each answer would be wrong.
    """
    start = next(start for start in reversed(ledger.starts) if source.tag in [each.tag for each in start.sources])
    saved = unpack_fingerprint(start.fingerprint)
    fields = saved.fields
    reader = _reader_of(ledger, source, fields)
    settings = {name.rpartition(".")[2]: value for name, value in fields.items() if name.rpartition(".")[0] == reader}
    files = data or source.files or source.address
    dataset = _opened(reader.rpartition("/")[2], files, settings, commits_of(saved.addresses))
    if not begin_with(dataset.entries, settings["shards"]):
        raise SavableError(
            f"{files}: these are not the samples that the run read, so that it is not known which were given: "
            f"{difference(settings['shards'], dataset.entries)}. Say where they are now, by --data, as the run named "
            "them (a folder, a glob, a file)"
        )
    return dataset


def _reader_of(ledger: LedgerFiles, source: LedgerSource, fields: dict[str, Any]) -> str:
    """The name of a source's reader in the run's settings, such as "web/ParquetReader".

    Raises `SavableError` unless there is one, of a kind that can be opened from here.
    """
    of = f"{source.name}/" if source.name else ""
    named = [
        name.removeprefix(of) for name in fields if name.startswith(of) and name.partition("#")[0].endswith(_SHARDS)
    ]
    readers = [name for name in named if "/" not in name]
    if len(readers) == 1 and readers[0].removesuffix(_SHARDS) in _KINDS:
        return of + readers[0].removesuffix(_SHARDS)
    kinds = sorted({name.partition("#")[0].removesuffix(_SHARDS) for name in readers}) or ["a stage of its own"]
    several = f"{len(readers)} readers" if len(readers) > 1 else "one reader"
    raise SavableError(
        f"{ledger.folder}: source {source.name!r} was read by {several}, {', '.join(kinds)}, which only the run's own "
        "program can open, so keys cannot be looked up from here. `savable ledger batch` makes a batch again with the "
        "run's pipeline function, and shows its samples"
    )


def _opened(reader: str, files: Shards, settings: dict[str, Any], pinned: dict[str, bytes]) -> Dataset:
    kind = _KINDS[reader]
    known = {
        name: settings.get(name)
        for name in ("key", "ranges", "length", "stride", "dtype", "key_end", "classes")
        if name in STORES[kind].settings
    }
    return dataset_of(
        lambda tolerant, unlistable: open_store(kind, files, tolerant, unlistable, pinned=pinned, **known)
    )


def _indices(dataset: Dataset, keys: Iterable[str]) -> dict[int, str]:
    """The numbers of the samples with these keys, by reading the key of every sample."""
    wanted = set(keys)
    return {index: key for index, key in enumerate(dataset.all_keys()) if key in wanted}

"""`Ledger`: when a run yielded samples, their outcomes, and their batches.

    start 1    yielded ── trained ── killed              trained, but lost: the model of the checkpoint has not seen it
    start 2    yielded again ── trained                  trained
               yielded again ── dropped: stale           dropped: stale

Samples are found by their keys, in the data opened as the run opened them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.opening import open_any
from savable_pipeline.data.dataset.shard_digests import difference, starts_with
from savable_pipeline.data.shards.paths import Shards, commits_of
from savable_pipeline.data.stores.formats import format_named
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.backend import InProcess
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.ledger.reader import LedgerFiles, RecordedBatch
from savable_pipeline.run.ledger.records import LedgerSource
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.states import NewShards
from savable_pipeline.run.state.fingerprint import compare, fingerprint, unpack_fingerprint
from savable_pipeline.run.state.flights import EPOCH_SHIFT
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.pipeline import PipelineFunction
from savable_pipeline.stages.readers.readers import READERS
from savable_pipeline.stages.stage import Stage

Found = list[tuple[str, RecordedBatch, int]]  # where a sample was yielded: source, batch, and rows as bits
_Row = tuple[int, int]  # a receipt: `epoch << 40 | slot` of the batch, and the number of the row
_KINDS = {reader.__name__: kind for kind, reader in READERS.items()}
_SHARDS = ".shards"  # end of a field's name in a fingerprint; each reader has such a field


@dataclass(frozen=True, slots=True)
class Sighting:
    """Record that a sample was yielded to a rank."""

    source: str
    """The name of its source in a `Blend`; "" without one."""
    epoch: int
    slot: int
    """The slot of the batch that the sample was in."""
    step: int
    """The number of that batch among those of its rank in the epoch."""
    rank: int
    world_size: int
    """The number of ranks at that time."""
    lost: bool
    """Whether the model that saw the sample was discarded, because the run was later resumed from an earlier slot."""
    again: bool = False
    """Whether it was repeated because it was in flight, see `SavableLoader(acknowledge=True)`."""
    outcome: str = ""
    """Its acknowledgement: "trained", "dropped: REASON" or "repeated". "": there is none."""

    @classmethod
    def of(cls, source: str, recorded: RecordedBatch, *, lost: bool, outcome: str) -> Sighting:
        """Build the record of a yielded batch."""
        batch, start = recorded.batch, recorded.start
        position = (batch.epoch, batch.slot, recorded.step, start.rank, start.world_size)
        return cls(source, *position, lost, bool(batch.again), outcome)


class Ledger:
    """The batches of a run, on all ranks and in all starts, from its `ledger=` folder.

    Args:
        folder: The folder of the ledger.

    Raises:
        SavableError: There is no ledger in the folder, one that cannot be read, or those of several runs.

    Example:
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"]
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> with sp.SavableLoader(pipeline, seed=7, lanes=2, ledger="ledger/") as loader:
        ...     first, second = next(loader), next(loader)
        ...     key = loader.trace().samples[0].key
        >>> ledger = sp.Ledger("ledger/")
        >>> [(seen.epoch, seen.slot, seen.rank) for seen in ledger.find([key])[key]]
        [(0, 1, 0)]
        >>> bool((ledger.batch(pipeline, slot=1) == second).all())
        True
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._files = LedgerFiles(Path(folder))

    def find(
        self, keys: Iterable[str], *, source: str | None = None, data: str | None = None
    ) -> dict[str, list[Sighting] | None]:
        """Find when the samples with these keys were yielded.

        The keys are read from the data of the run, with its settings. A batch that was yielded after a position from
        which the run was later resumed is marked as `lost`.

        Args:
            keys: Keys of samples.
            source: Only this source of a `Blend`. Default: all.
            data: Where the samples of the source are now. Default: where the run read them.

        Returns:
            A list of records for each key, in the order of `keys`, or None if no sample has the key. There is a record
            for each time that a sample with the key was yielded, source by source and file of the ledger by file. A
            record has `source`, `epoch`, `slot`, `step`, `rank`, `world_size`, `lost`, `again` and `outcome`.

        Raises:
            ValueError: `keys` is one str.
            SavableError: There is no such source, the data cannot be opened as the run opened them, or they are no
                longer those that it read.
        """
        if isinstance(keys, str):
            raise ValueError(f"keys must be a list: [{keys!r}]")
        found = _find_keys(self._files, keys, source=source, data=data)
        return {key: None if recorded is None else _sightings(self._files, recorded) for key, recorded in found.items()}

    def batch(self, pipeline: PipelineFunction, *, slot: int, epoch: int = 0) -> Any:
        """Rebuild a batch of the run, byte for byte as it was yielded.

        The lane runs from its last state in the ledger, so it skips at most 1,000 batches.

        Args:
            pipeline: The run's pipeline function. Settings and data must be those of the run; shards may have been
                added since.
            slot: The slot of the batch.
            epoch: Its epoch. Default: 0, the only epoch of an endless run.

        Returns:
            The batch, as the pipeline's last stage built it.

        Raises:
            SavableError: No such batch was yielded, or the pipeline builds it from other samples than the ledger names.
            CheckpointMismatchError: Settings or data are not those of the run.
        """
        return rebuild_batch(pipeline, self._files, epoch, slot).batch


def _sightings(ledger: LedgerFiles, found: Found) -> list[Sighting]:
    """Return a record of each time that a sample was yielded, in order, with its outcome."""
    rows_of_each = [_receipts(recorded, bits) for _, recorded, bits in found]
    outcomes = _acknowledged(ledger, {batch for rows in rows_of_each for batch, _ in rows})
    last_start: dict[_Row, int] = {}  # number of the last start in which each row was yielded
    last_index: dict[tuple[int, _Row], int] = {}  # index in `found` of the last time that a start yielded a row
    for index, ((_, recorded, _), rows) in enumerate(zip(found, rows_of_each, strict=True)):
        for row in rows:
            last_start[row] = max(last_start.get(row, 0), recorded.start_number)
            last_index[recorded.start_number, row] = index
    sightings = []
    for index, ((source, recorded, _), rows) in enumerate(zip(found, rows_of_each, strict=True)):
        row_outcomes, lost = set(), recorded.lost
        for row in rows:
            start_and_row = recorded.start_number, row
            outcome = outcomes.get(start_and_row, "") if last_index[start_and_row] == index else ""
            is_yielded_later = last_start[row] > recorded.start_number or last_index[start_and_row] > index
            lost |= bool(outcome) and is_yielded_later
            row_outcomes.add(outcome or ("repeated" if is_yielded_later and not recorded.lost else ""))
        outcome = " and ".join(sorted(filter(None, row_outcomes)))
        sightings.append(Sighting.of(source, recorded, lost=lost, outcome=outcome))
    return sightings


def _receipts(recorded: RecordedBatch, bits: int) -> list[_Row]:
    """Return the receipts of those rows of a batch that are set in `bits`."""
    batch = recorded.batch.epoch << EPOCH_SHIFT | recorded.batch.slot
    return [(batch, row) for row in range(bits.bit_length()) if bits >> row & 1]


def _acknowledged(ledger: LedgerFiles, batches: Iterable[int]) -> dict[tuple[int, _Row], str]:
    """Return the acknowledgement of each row of these batches, by the start in which it was acknowledged, and row."""
    wanted, found = set(batches), {}
    for start_number, record in ledger.acknowledged():
        outcome = "trained" if record.kind == "done" else f"dropped: {record.reason}"
        for batch in wanted & record.rows.keys() if record.kind != "again" else ():
            bits = int.from_bytes(record.rows[batch], "little")
            for row in (row for row in range(bits.bit_length()) if bits >> row & 1):
                found[start_number, (batch, row)] = outcome
    return found


def _find_keys(
    ledger: LedgerFiles, keys: Iterable[str], *, source: str | None = None, data: str | None = None
) -> dict[str, Found | None]:
    """Return where the samples with each key were yielded, or None for a key that no sample has.

    `source`: only this source of a `Blend`. `data`: the new location of its samples. Raises `SavableError` for an
    unknown source, and for data that are not those of the run.
    """
    found: dict[str, Found | None] = dict.fromkeys(keys)
    for each in _chosen_sources(ledger, source, data):
        key_of = _keys_by_index(_dataset(ledger, each, data), found)
        found |= {key: found[key] or [] for key in key_of.values()}
        for index, recorded, rows in ledger.find(each.tag, set(key_of)):
            found[key_of[index]] = [*(found[key_of[index]] or []), (each.name, recorded, rows)]
    return found


def _chosen_sources(ledger: LedgerFiles, source: str | None, data: str | None) -> list[LedgerSource]:
    names = [each.name for each in ledger.sources]
    if source is not None and source not in names:
        raise SavableError(f"{ledger.folder}: no source is called {source!r}. The sources are {', '.join(names)}.")
    chosen = [each for each in ledger.sources if source in (None, each.name)]  # all sources if `source` is None
    if data is not None and len(chosen) > 1:
        raise SavableError(f"--data needs --source, one of {', '.join(names)}")
    return chosen


def _dataset(ledger: LedgerFiles, source: LedgerSource, data: str | None) -> Dataset:
    """Open the dataset of a source with the settings of the last start that used it.

    `data` is its new location. Raises `SavableError` if its files have other samples than the run has read.
    """
    start = next(start for start in reversed(ledger.starts) if source.tag in [each.tag for each in start.sources])
    saved = unpack_fingerprint(start.fingerprint)
    fields = saved.fields
    reader = _reader_of(ledger, source, fields)
    settings = {name.rpartition(".")[2]: value for name, value in fields.items() if name.rpartition(".")[0] == reader}
    files = data or source.files or source.address
    dataset = _open_dataset(reader.rpartition("/")[2], files, settings, commits_of(saved.addresses))
    if not starts_with(dataset.entries, settings["shards"]):
        raise SavableError(
            f"{files}: not the samples of the run. Name them with --data.\n  "
            f"{difference(settings['shards'], dataset.entries)}"
        )
    return dataset


def _reader_of(ledger: LedgerFiles, source: LedgerSource, fields: dict[str, Any]) -> str:
    """Return the name of a source's reader in the run's settings, such as "web/ParquetReader".

    Raises `SavableError` unless the source has one reader, of a kind that `_open_dataset` can open.
    """
    prefix = f"{source.name}/" if source.name else ""
    shard_fields = [
        name.removeprefix(prefix)
        for name in fields
        if name.startswith(prefix) and name.partition("#")[0].endswith(_SHARDS)
    ]
    readers = [name for name in shard_fields if "/" not in name]
    if len(readers) == 1 and readers[0].removesuffix(_SHARDS) in _KINDS:
        return prefix + readers[0].removesuffix(_SHARDS)
    kinds = sorted({name.partition("#")[0].removesuffix(_SHARDS) for name in readers}) or ["a stage of its own"]
    several = f"{len(readers)} readers" if len(readers) > 1 else "one reader"
    raise SavableError(
        f"{ledger.folder}: keys of {source.name!r} cannot be found, because only your program opens {several} "
        f"({', '.join(kinds)}). Use `savable ledger batch`, which shows the samples of a batch."
    )


def _open_dataset(reader: str, files: Shards, settings: dict[str, Any], pinned: dict[str, bytes]) -> Dataset:
    """Open files as a reader with this class name and these settings does."""
    kind = _KINDS[reader]
    known: dict[str, Any] = {
        name: settings.get(name)
        for name in ("key", "ranges", "length", "stride", "dtype", "key_end", "classes")
        if name in format_named(kind).settings
    }
    return open_any(files, format=kind, pinned=pinned, **known)


def _keys_by_index(dataset: Dataset, keys: Iterable[str]) -> dict[int, str]:
    """Return the samples that have one of `keys`, as a dict of index to key. This reads all keys of the dataset."""
    wanted = set(keys)
    return {index: key for index, key in enumerate(dataset.all_keys()) if key in wanted}


class RebuiltBatch(NamedTuple):
    """A rebuilt batch, the last stage of its lane, and its record in the ledger."""

    batch: Any
    stage: Stage
    recorded: RecordedBatch


def rebuild_batch(pipeline: PipelineFunction, ledger: LedgerFiles, epoch: int, slot: int) -> RebuiltBatch:
    """Rebuild the batch of a slot, byte for byte.

    The lane runs from its last state in the ledger, at most 1,000 batches before. Shards may have been added since.
    Raises `SavableError` if the run had no such batch, or the pipeline builds another one, and
    `CheckpointMismatchError` if settings or data differ otherwise.
    """
    recorded = ledger.batch_at(epoch, slot)
    start = recorded.start
    lane = slot % start.lanes
    local = LocalLanes(LaneJob(pipeline, start.seed, start.lanes, start.pad), lane)
    facts = _facts_at(recorded, local)
    record = ledger.state_before(epoch, slot)
    saved = LaneState(lane, epoch) if record is None else unpack_state(record.state, LaneState, "lane")
    next_slot = lane if record is None else record.slot
    state = pack_state(replace(saved, facts=facts.digest))
    builder = InProcess(local.runner)
    for _ in range((slot - next_slot) // start.lanes):
        state = builder.answer(builder.request(lane, state, "skip", facts)).state
    rebuilt = builder.answer(builder.request(lane, state, facts=facts))
    last = local.runner.stage_at(lane, rebuilt.state)
    assert last is not None
    _check_samples(rebuilt.samples, recorded)
    return RebuiltBatch(rebuilt.batch, last, recorded)


def _facts_at(recorded: RecordedBatch, local: LocalLanes) -> RunFacts:
    """Return the facts of the run at a batch, so that its lanes read only the shards that the run had then.

    Raises `CheckpointMismatchError` if the pipeline differs from that of the run in more than added shards.
    """
    start, facts = recorded.start, recorded.facts
    saved = unpack_fingerprint(start.fingerprint)
    local.use_facts(facts)
    current = fingerprint(local.last_stage, seed=start.seed, lanes=start.lanes)
    new = NewShards(saved, current, local)
    compare(new.before, current)
    return replace(facts, growth=new.growth_before | facts.growth)


def _check_samples(rebuilt: BatchSamples, recorded: RecordedBatch) -> None:
    """Raise `SavableError` unless the batch has the samples that the ledger names."""
    if rebuilt.by_row() != recorded.batch.samples.by_row():
        raise SavableError(
            f"slot {recorded.batch.slot} of epoch {recorded.batch.epoch}: the pipeline reads other samples than the "
            "ledger recorded. Use the code and data of the run."
        )

"""Last steps of a conversion: join small shards, name all, write the index.

    000000/000000.tar  000000/000001.tar  000001/000000.tar       ─▶  000000.tar  000001.tar  000002.tar
    more than 1.15 times the fewest possible: the last of each range ─ joined in their order ─▶  joined/…

Each step may be repeated after a kill: the records of the ranges stay until the conversion is done.
"""

from __future__ import annotations

import functools
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from savable_pipeline.core.files import replace_file, replacing
from savable_pipeline.core.wording import counted, human_bytes, listed
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.part_types import dotted_parts, lacking_parts
from savable_pipeline.data.shards.tar_format import room_in, tar_idx
from savable_pipeline.data.stores.folder_store import FOLDER, SPLITS
from savable_pipeline.data.stores.sample_names import Reject
from savable_pipeline.data.stores.table_store import A_URL
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert.describe import describe_tables
from savable_pipeline.tools.convert.manifest import Manifest, write_manifest
from savable_pipeline.tools.convert.options import CLASSES, HASHES, REJECTED, Options, Report
from savable_pipeline.tools.convert.prepare import NO_FILES, Prepared, check_keys, check_parts
from savable_pipeline.tools.convert.range_job import RangeJob, RangeRecord, RangeShard, join_shards
from savable_pipeline.tools.convert.samples import Statistics
from savable_pipeline.tools.convert.source import ConversionSource
from savable_pipeline.tools.convert.target import Target

_MOST = 1.15  # small shards are joined above this multiple of the fewest possible
_SHARED = 1.1  # a warning above this multiple of the bytes of the files that records name
_COUNTED = re.compile(r"[0-9._-]{3,}")  # numbered parts of a large dataset, and dates


class _Shard(NamedTuple):
    """A shard of a range: the number of its job, and its own number in the record."""

    job: RangeJob
    number: int
    name: str
    samples: int
    size: int


def finish(
    output: Target,
    source: ConversionSource,
    found: Prepared,
    options: Options,
    jobs: list[RangeJob],
    manifest: Manifest,
) -> Report:
    """Join, name and describe the shards of all ranges.

    Raises ValueError for parts and keys that no sample has.
    """
    splits = [name for name, _ in options.split] or [""]
    shards: dict[str, list[_Shard]] = {split: [] for split in splits}
    statistics, rejected, hashes = Statistics(), [*found.rejected], list[int]()
    records = functools.lru_cache(maxsize=2)(RangeJob.record)
    with replacing(output.folder / HASHES, sync=True) as file:
        for job in jobs:
            record = records(job)
            statistics.add(record.statistics)
            rejected += record.rejected
            hashes.append(len(record.hashes) // 8)
            file.write(record.hashes)
            for number, piece in enumerate(record.pieces):
                shards[piece.split].append(_shard(job, number, piece))
    _check_found(jobs, statistics, rejected, options, sum(map(len, shards.values())))
    for split in splits:
        shards[split] = [*_joined(jobs, split, shards[split], options, records)]
    names = {name: shard for split in sorted(splits) for name, shard in _named(split, shards[split])}
    _publish(output, options, splits, names, records, statistics)
    replace_file(output.folder / REJECTED, (msgspec.json.encode(reject) + b"\n" for reject in rejected), sync=True)
    if found.classes:
        replace_file(output.folder / CLASSES, [json.dumps(found.classes, ensure_ascii=False).encode()], sync=True)
    samples, size = sum(shard.samples for shard in names.values()), sum(shard.size for shard in names.values())
    warnings = _warnings(source, found, options, samples, statistics)
    report = Report(samples, len(names), size, rejected, found.hidden, warnings, statistics.nulls)
    result = {"size": size, "hidden": found.hidden, "warnings": warnings, "nulls": statistics.nulls}
    result |= {"hashes": hashes, "names_files": bool(statistics.uses or statistics.named)}
    write_manifest(output.folder, msgspec.structs.replace(manifest, done=True, **result))
    output.publish({*names})
    return report


def jobs_with_repeats(jobs: list[RangeJob]) -> list[RangeJob]:
    """Return the jobs, with new ones for ranges in which keys are repeated.

    A new job knows which samples have a repeated key, and writes the range again.

    Hashes are compared in a file, so that memory does not grow with the number of samples.
    """
    if not jobs:
        return jobs
    path = jobs[0].work / "keys"
    with path.open("wb") as file:
        for job in jobs:
            file.write(job.record().keys)
    if not path.stat().st_size:
        return jobs
    hashes = np.memmap(path, "<u8", "r+")
    hashes.sort()
    blocks = (hashes[start : start + (1 << 20) + 1] for start in range(0, len(hashes), 1 << 20))
    repeated = np.unique(np.concatenate([block[1:][block[1:] == block[:-1]] for block in blocks]))
    # Among files of a folder with one key, no file is the first.
    met = np.full(len(repeated), jobs[0].source.form == FOLDER)  # whether a key occurred in an earlier range
    return [_with_repeats(job, job.record().keys, repeated, met) for job in jobs] if len(met) else jobs


def _with_repeats(job: RangeJob, keys: bytes, repeated: NDArray[np.uint64], met: NDArray[np.bool_]) -> RangeJob:
    numbers = np.frombuffer(keys, "<u8")
    at = np.minimum(np.searchsorted(repeated, numbers), len(repeated) - 1)
    again = repeated[at] == numbers
    samples = np.flatnonzero(again)
    found, first = np.unique(at[samples], return_index=True)
    again[samples[first[~met[found]]]] = False  # the first sample with a key has it
    met[found] = True
    if not again.any():
        return job
    return replace(job, name=f"{job.name}-again", repeats=np.packbits(again, bitorder="little").tobytes())


def _shard(job: RangeJob, number: int, piece: RangeShard) -> _Shard:
    entry = piece.table.entry
    return _Shard(job, number, entry.name, entry.samples, entry.size)


def _check_found(
    jobs: list[RangeJob], statistics: Statistics, rejected: list[Reject], options: Options, shards: int
) -> None:
    """Raise ValueError for chosen keys and parts that no sample has, and for URLs instead of files."""
    check_keys((jobs[0].keys if jobs and jobs[0].keys else frozenset()).difference(statistics.found))
    check_parts(options, statistics.parts or [""], {*statistics.parts, *statistics.dropped})
    named = next((reject for reject in rejected if reject.reason == A_URL), None)
    if not shards and named is not None:
        raise ValueError(f"{named.file}: records name URLs, not files, such as {named.detail}. {NO_FILES}")


def _joined(
    jobs: list[RangeJob],
    split: str,
    shards: list[_Shard],
    options: Options,
    records: Callable[[RangeJob], RangeRecord],
) -> Iterator[_Shard]:
    """Yield the shards, with the last ones of the ranges joined if these are too many."""
    room = max(1, room_in(options.shard_bytes))
    fewest = -(-sum(shard.size for shard in shards) // room)
    if options.shard_samples is not None:
        fewest = max(fewest, -(-sum(shard.samples for shard in shards) // options.shard_samples))
    last = [i for i, shard in enumerate(shards) if i + 1 == len(shards) or shards[i + 1].job is not shard.job]
    if len(shards) <= _MOST * fewest or len(last) < 2:
        yield from shards
        return
    job = replace(jobs[0], name=f"joined-{split}")
    if not job.is_finished:
        job.note(
            join_shards(job, [(shards[i].job.name, records(shards[i].job).pieces[shards[i].number]) for i in last])
        )
    yield from _in_order(shards, {*last}, [_shard(job, *each) for each in enumerate(records(job).pieces)])


def _in_order(shards: list[_Shard], last: set[int], joined: list[_Shard]) -> Iterator[_Shard]:
    """Yield the shards, each joined one where the first of its samples was."""
    waiting, start, end = deque(joined), 0, 0
    for i, shard in enumerate(shards):
        if i not in last:
            yield shard
            continue
        end += shard.samples
        while waiting and start < end:
            start += waiting[0].samples
            yield waiting.popleft()


def _named(split: str, shards: list[_Shard]) -> Iterator[tuple[str, _Shard]]:
    width = max(6, len(str(len(shards) - 1)))
    prefix = f"{split}-" if split else ""
    return ((f"{prefix}{number:0{width}d}.tar", shard) for number, shard in enumerate(shards))


def _publish(
    output: Target,
    options: Options,
    splits: list[str],
    names: dict[str, _Shard],
    records: Callable[[RangeJob], RangeRecord],
    statistics: Statistics,
) -> None:
    """Rename the shards, after their offsets, and write the index and the metadata."""

    def tables() -> Iterator[ShardTable]:
        for name, shard in names.items():
            table = records(shard.job).pieces[shard.number].table
            yield msgspec.structs.replace(table, entry=msgspec.structs.replace(table.entry, name=name))

    for table in tables():
        name, shard = table.entry.name, names[table.entry.name]
        (output.work / f"{name}.idx").write_bytes(tar_idx(table))
        output.publish_shard(f"{shard.job.name}/{shard.name}", name)
    if names:
        counts = {name: shard.samples for name, shard in names.items()}
        texts = frozenset(statistics.texts or ())
        if options.only and "json" not in {name.lower() for name in options.only}:
            texts = frozenset()
        layouts, parts = map(frozenset, statistics.layouts), tuple(splits) if options.split else ()
        describe_tables(output.folder, output.work, tables(), counts, layouts, texts, parts)


def _warnings(
    source: ConversionSource, found: Prepared, options: Options, samples: int, statistics: Statistics
) -> list[str]:
    """Return warnings about samples that differ from the others, and about ambiguous names."""
    warnings = [*_shared(statistics), *found.warnings]
    if statistics.renamed:
        keys = counted(statistics.renamed, "key")
        warnings.append(f"{keys} had dots, which become _ in tars: {statistics.example}")
    form = source.form
    if statistics.repeats and form == TARS:
        keys = counted(statistics.repeats, "key occurs", "keys occur")
        warnings.append(f"{keys} again, and got the name of their shard before them: {listed(statistics.repeated)}")
    if found.source.files_from and not statistics.named:
        warnings.append("no row names a file without its bytes: --files-from is not needed")
    warnings += lacking_parts(samples, statistics.parts)
    if not options.key_end:
        warnings += dotted_parts(samples, statistics.parts, statistics.most_parts)
    if not options.split and not source.packed and form.name in ("tar", "jsonl", "parquet", "arrow"):
        warnings.append(
            "subset= draws fractions of shards by their order, so other samples than of the source. Use --split to "
            "separate some"
        )
    if form == FOLDER and not options.classes:
        warnings += _classes_hint(samples, statistics)
    return warnings


def _shared(found: Statistics) -> list[str]:
    """Return a warning if several records name one file, because each stores its bytes."""
    factor = found.used_bytes / max(1, found.file_bytes)
    if factor < _SHARED:
        return []
    return [
        f"{found.uses:,} uses of {found.files:,} files: those that several records name are stored with each, which "
        f"takes {factor:.1f} times their {human_bytes(found.file_bytes)}; put all of one file into one record to store "
        "it once"
    ]


def _classes_hint(samples: int, found: Statistics) -> list[str]:
    """Return a hint if folders look like classes: each sample is one medium, and no folder is a split."""
    names = {*found.folders}
    if (
        not found.only_media
        or not 1 < len(names) <= samples // 2
        or names <= SPLITS
        or all(map(_COUNTED.fullmatch, names))
    ):
        return []
    return [
        f"the folders {listed(sorted(names))} look like classes: --classes gives each sample its folder's number "
        "as the part cls, and writes the names to classes.json"
    ]

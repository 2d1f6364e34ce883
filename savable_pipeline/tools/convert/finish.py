"""Last steps of a conversion: join small shards, name all shards, write the index.

    000000/000000.tar  000000/000001.tar  000001/000000.tar       ─▶  000000.tar  000001.tar  000002.tar

The last shard of a range may be small. If there are more than 1.15 times the fewest possible shards, the last shards of
all ranges are joined in their order into `joined-SPLIT/`. Each step may be repeated after a kill, because the records
of the ranges remain until the end.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from savable_pipeline.core.files import replace_file, replacing
from savable_pipeline.core.wording import counted, human_bytes, listed
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.metadata import INDEX_NAME
from savable_pipeline.data.shards.number_spool import NumberSpool
from savable_pipeline.data.shards.part_types import dotted_parts, lacking_parts
from savable_pipeline.data.shards.tar_format import tar_idx
from savable_pipeline.data.stores.folder_store import FOLDER, SPLITS
from savable_pipeline.data.stores.table_store import A_URL
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert.describe import write_energon_files
from savable_pipeline.tools.convert.manifest import Manifest, write_manifest
from savable_pipeline.tools.convert.options import CLASSES, HASHES, REJECTED, Options, Report
from savable_pipeline.tools.convert.prepare import NO_FILES, Prepared, check_keys, check_parts
from savable_pipeline.tools.convert.range_job import RangeJob, WrittenShard, join_shards, shard_table
from savable_pipeline.tools.convert.samples import TEXT_FIELDS, Statistics
from savable_pipeline.tools.convert.shard_series import room_in
from savable_pipeline.tools.convert.source import TABLES
from savable_pipeline.tools.convert.target import Target

_JOIN_ABOVE = 1.15  # small shards are joined if there are more shards than this multiple of the fewest possible
_WARN_ABOVE = 1.1  # a warning if copies of files take more bytes than this multiple of the files
_DIGITS = re.compile(r"[0-9._-]{3,}")  # names of folders that are numbers or dates, so no classes


def finish(
    output: Target,
    found: Prepared,
    options: Options,
    jobs: list[RangeJob],
    manifest: Manifest,
) -> Report:
    """Join, name and describe the shards of all ranges.

    Raises ValueError if no sample has a chosen part or a chosen key.
    """
    splits = [name for name, _ in options.split] or [""]
    shards: dict[str, list[WrittenShard]] = {split: [] for split in splits}
    statistics, rejected, hashes = Statistics(), [*found.rejected], list[int]()
    with replacing(output.folder / HASHES, sync=True) as file:
        for job in jobs:
            record = job.record()
            statistics.add(record.statistics)
            rejected += record.rejected
            file.write(job.content_hashes().array().data)
            hashes.append(record.contents[1])
            for shard in record.shards:
                shards[shard.split].append(shard)
    check_keys(((jobs[0].keys if jobs else None) or frozenset()).difference(statistics.found))
    check_parts(options, statistics.parts or [""], {*statistics.parts, *statistics.dropped})
    if not any(shards.values()) and (reject := next((reject for reject in rejected if reject.reason == A_URL), None)):
        raise ValueError(f"{reject.file}: records name URLs, not files, such as {reject.detail}. {NO_FILES}")
    for split in splits:
        shards[split] = _joined(jobs, split, shards[split], options)
    by_name = {name: shard for split in sorted(splits) for name, shard in _with_names(split, shards[split])}
    _publish(output, found, options, splits, by_name, statistics)
    replace_file(output.folder / REJECTED, (msgspec.json.encode(reject) + b"\n" for reject in rejected), sync=True)
    if found.classes:
        replace_file(output.folder / CLASSES, [json.dumps(found.classes, ensure_ascii=False).encode()], sync=True)
    samples = sum(shard.entry.samples for shard in by_name.values())
    size = sum(shard.entry.size for shard in by_name.values())
    warnings = _warnings(found, options, samples, statistics)
    report = Report(samples, len(by_name), size, rejected, found.hidden, warnings, statistics.nulls)
    result = {"report": replace(report, rejected=[]), "names_files": bool(statistics.uses or statistics.named)}
    write_manifest(output.folder, msgspec.structs.replace(manifest, done=True, hashes=hashes, **result))
    output.publish({*by_name})
    return report


def jobs_with_repeats(jobs: list[RangeJob]) -> list[RangeJob]:
    """Return the jobs, with new ones for ranges in which keys are repeated.

    A new job writes the range again, under another name, and its `repeats` has the samples with repeated keys. Memory
    grows only with the number of repeated keys.
    """
    keys, firsts = NumberSpool(), [0]
    for job in jobs:
        keys.write(hashes := job.key_hashes())
        firsts.append(firsts[-1] + len(hashes))
    # hashes of keys that an earlier sample has; a bit for each sample of a job, by the number of the job
    met, repeats = set[int](), dict[int, bytearray]()
    for position, key in keys.repeated() if firsts[-1] else ():
        if key in met or jobs[0].source.form == FOLDER:  # among files of a folder with one key, no file is the first
            number = bisect.bisect_right(firsts, position) - 1
            bits = repeats.setdefault(number, bytearray((firsts[number + 1] - firsts[number] + 7) // 8))
            sample = position - firsts[number]
            bits[sample >> 3] |= 1 << (sample & 7)
        met.add(key)
    return [
        replace(job, name=f"{job.name}-again", repeats=bytes(repeats[number])) if number in repeats else job
        for number, job in enumerate(jobs)
    ]


def _joined(jobs: list[RangeJob], split: str, shards: list[WrittenShard], options: Options) -> list[WrittenShard]:
    """Return the shards of a split. If there are too many, the last shards of the ranges are joined."""
    room = max(1, room_in(options.shard_bytes))
    fewest = -(-sum(shard.entry.size for shard in shards) // room)
    if options.shard_samples is not None:
        fewest = max(fewest, -(-sum(shard.entry.samples for shard in shards) // options.shard_samples))
    last = [i for i, shard in enumerate(shards) if i + 1 == len(shards) or shards[i + 1].range != shard.range]
    if len(shards) <= _JOIN_ABOVE * fewest or len(last) < 2:
        return shards
    job = replace(jobs[0], name=f"joined-{split}")
    if not job.is_finished:
        job.note(join_shards(job, split, [shards[i] for i in last]))
    joined = job.record().shards
    ends = [*itertools.accumulate(shards[i].entry.samples for i in last)]
    firsts = itertools.accumulate((shard.entry.samples for shard in joined), initial=0)
    # (position among `shards`, number of the joined shard) orders the shards that remain and the joined ones
    found = {(i, 0): shards[i] for i in {*range(len(shards))}.difference(last)}
    # A joined shard gets the position of the shard that its first sample was in.
    for number, (first, shard) in enumerate(zip(firsts, joined, strict=False)):
        found[last[bisect.bisect_right(ends, first)], number] = shard
    return [found[order] for order in sorted(found)]


def _with_names(split: str, shards: list[WrittenShard]) -> Iterator[tuple[str, WrittenShard]]:
    """Yield the final name of each shard of a split, and the shard."""
    width = max(6, len(str(len(shards) - 1)))
    prefix = f"{split}-" if split else ""
    return ((f"{prefix}{number:0{width}d}.tar", shard) for number, shard in enumerate(shards))


def _publish(
    output: Target,
    found: Prepared,
    options: Options,
    splits: list[str],
    by_name: dict[str, WrittenShard],
    statistics: Statistics,
) -> None:
    """Give the shards their final names, and write the index and the metadata.

    The `.idx` file of a shard, with the offsets of its samples, is written before the shard is renamed.
    """

    def tables() -> Iterator[ShardTable]:
        for name, shard in by_name.items():
            table = shard_table(output.work, shard)
            yield msgspec.structs.replace(table, entry=msgspec.structs.replace(table.entry, name=name))

    for (name, shard), table in zip(by_name.items(), tables(), strict=True):
        (output.work / f"{name}.idx").write_bytes(tar_idx(table))
        output.publish_shard(f"{shard.range}/{shard.entry.name}", name)
    if by_name:
        write_index(output.work / "savable.index", tables(), TARS)
        (output.work / "savable.index").replace(output.folder / INDEX_NAME)
        has_texts = found.source.form in TABLES and (not options.only or "json" in map(str.lower, options.only))
        texts = frozenset(TEXT_FIELDS if has_texts else ()) - statistics.not_texts
        write_energon_files(output.folder, output.folder / INDEX_NAME, texts, splits if options.split else ())


def _warnings(found: Prepared, options: Options, samples: int, statistics: Statistics) -> list[str]:
    """Return warnings about samples that differ from the others, and about ambiguous names."""
    warnings = [*_repeated_files(statistics), *found.warnings]
    if statistics.renamed:
        keys = counted(statistics.renamed, "key")
        warnings.append(f"{keys} had dots, which become _ in tars: {min(statistics.examples)}")
    form = found.source.form
    if statistics.repeats and form == TARS:
        keys = counted(statistics.repeats, "key occurs", "keys occur")
        warnings.append(
            f"{keys} again, and got the name of their shard before them: {listed(sorted(statistics.repeated))}"
        )
    if found.source.files_from and not statistics.named:
        warnings.append("no row names a file without its bytes: --files-from is not needed")
    warnings += lacking_parts(samples, statistics.parts)
    if not options.key_end:
        warnings += dotted_parts(samples, statistics.parts, max(map(len, statistics.layouts), default=0))
    if not options.split and not found.source.packed and form.name in ("tar", "jsonl", "parquet", "arrow"):
        warnings.append(
            "subset= draws fractions of shards by their order, so other samples than of the source. Use --split to "
            "separate some"
        )
    if form == FOLDER and not options.classes:
        warnings += _classes_hint(samples, statistics)
    return warnings


def _repeated_files(found: Statistics) -> list[str]:
    """Return a warning in a list if records share files, because each stores a copy. Otherwise an empty list."""
    factor = found.used_bytes / max(1, found.file_bytes)
    if factor < _WARN_ABOVE:
        return []
    return [
        f"{found.uses:,} uses of {found.files:,} files: each record stores its own copies, which takes {factor:.1f} "
        f"times the {human_bytes(found.file_bytes)} of the files. Join the records of a file to store it once"
    ]


def _classes_hint(samples: int, found: Statistics) -> list[str]:
    """Return a hint in a list if folders look like classes, otherwise an empty list.

    They do if each sample is a single image, audio or video, and the folders are not just splits, numbers or dates.
    """
    names = found.folders
    if found.others or not 1 < len(names) <= samples // 2 or names <= SPLITS or all(map(_DIGITS.fullmatch, names)):
        return []
    return [
        f"the folders {listed(sorted(names))} look like classes: --classes gives each sample its folder's number "
        "as the part cls, and writes the names to classes.json"
    ]

"""Check a file: its structure, its sidecar files, and every part of its samples."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.on_error import reason_of
from savable_pipeline.core.wording import encodable
from savable_pipeline.data.dataset.decoding import image_warnings
from savable_pipeline.data.media.media_info import media_fault
from savable_pipeline.data.media.video import Video, frames_lacking
from savable_pipeline.data.remote.session import Session
from savable_pipeline.data.shards import part_types
from savable_pipeline.data.shards.index import TAR, Format, IndexedFiles, ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.data.shards.tar_format import Links, TarColumns
from savable_pipeline.data.stores.formats import FORMATS
from savable_pipeline.data.stores.grouped_store import NO_BYTES
from savable_pipeline.data.stores.lerobot import INFO, EpisodeRange
from savable_pipeline.data.stores.opening import store_of
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.errors import SavableError, ShardError

_MOST_READ_BYTES = 1 << 30  # bytes up to which a part is read whole; no image or text is larger, but a video may be
ONE_KEYFRAME, NOT_DECODED = "one keyframe", "not decoded"  # counts of long videos, and of media without PyAV
_LEAST_ZERO_BYTES = 64  # bytes of a part of zeros that is a problem; a shorter one may be intended


class Problem(msgspec.Struct, frozen=True):
    """Error in a dataset, in one of its shards, or in a part of a sample."""

    reason: str
    detail: str
    shard: str = ""
    key: str = ""
    part: str = ""
    offset: int | None = None
    index: int | None = None  # index of the sample in the shard


class ShardReport(msgspec.Struct):
    """Result of the check of a shard: its size and its problems."""

    name: str
    size: int
    samples: int
    digest: int
    problems: list[Problem]
    parts: dict[str, int] = {}  # by part, the number of samples that have it
    most_parts: int = 0  # the largest number of parts of a sample
    dotted: list[tuple[str, ...]] = []  # in a tar, the parts of samples whose part names all have a dot
    empty: dict[str, int] = {}  # by part, the number of samples whose part has no bytes
    nulls: dict[str, int] = {}  # by column, the number of samples with null
    links: Links = Links(0)
    counts: dict[str, int] = {}  # unusual images and media, by reason


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """How to check files.

    Args:
        form: The format of the files.
        share: The fraction of audio and video parts to decode.
        settings: Settings of the store.
    """

    form: Format = TARS
    share: float = 1.0
    settings: dict[str, Any] = field(default_factory=dict)


def check_file(root: Path, name: str, options: CheckSettings) -> ShardReport:
    """Read a whole file, and report its errors as problems."""
    file_format = options.form
    table = file_format.scan(root, name)
    entry, counts = table.entry, _FileCounts(options.share)
    problems: list[Problem] = []
    if entry.fault:
        reason = "damaged shard" if (root / name).exists() else "missing shard"
        problems.append(Problem(reason, entry.fault.removeprefix(f"{name}: "), name))
    elif fault := file_format.offsets_error(root / name, table):
        problems.append(Problem(f"wrong {file_format.suffixes[0]}{file_format.offsets_suffix}", fault, name))
    if table.note:
        problems.append(Problem("torn samples", table.note, name))
    if entry.samples:
        try:
            with tempfile.TemporaryDirectory() as temporary:
                problems += _check_store(_open_store(options, [table], root, Path(temporary) / "index"), name, counts)
                if file_format.name == "lerobot" and (root / INFO).exists():
                    tables = [table, file_format.scan(root, INFO)]
                    store = _open_store(options, tables, root, Path(temporary) / "episodes")
                    problems += _check_frames(store, root, name, counts)
        except (SavableError, ValueError) as error:
            problems.append(Problem("cannot be checked", encodable(str(error)), name))
    report = ShardReport(name, entry.size, entry.samples, entry.digest, problems)
    report.parts, report.empty, report.nulls = dict(counts.parts), dict(counts.empty), dict(counts.nulls)
    report.most_parts, report.counts = counts.most_parts, dict(counts.media)
    if file_format.name == TAR:
        report.dotted, report.links = sorted(counts.dotted), TarColumns.of(table).links
    return report


def _open_store(options: CheckSettings, tables: list[ShardTable], root: Path, path: Path) -> RecordStore:
    """Open the store of these files, with an index in another folder so that theirs is not changed."""
    write_index(path, tables, options.form)
    files = IndexedFiles(options.form, options.form.index_at(path), path, None, root, tolerant=True)
    return store_of(files, inspect=True, **options.settings)


def _check_store(store: RecordStore, name: str, counts: _FileCounts) -> Iterator[Problem]:
    """Read every sample of a file, and yield problems."""
    try:
        store.validate(0)
    except ShardError as error:
        yield Problem("wrong hash", encodable(str(error).removeprefix(f"{store.address}/{name}: damaged: ")), name)
    row = 0
    while row < store.entries[0].samples:
        try:
            yield from _check_row(store, name, row, counts)
            row += 1
        except SavableError as error:
            detail = encodable(str(error).removeprefix(f"{store.address}/{name}: "))
            yield Problem(reason_of(error), detail, name, index=row)
            row = store.next_readable(0, row, reason_of(error))
    yield from _check_named_files(store, name, counts)
    yield from (Problem(reject.reason, reject.detail, reject.file, reject.key) for reject in store.rejects())


def _check_frames(store: RecordStore, root: Path, name: str, counts: _FileCounts) -> Iterator[Problem]:
    """Yield a problem for each video of an episode that has fewer frames than the episode's row states.

    No frame is decoded.
    """
    times: dict[str, NDArray[np.float64]] = {}  # times of frames, by file
    for row in range(store.entries[0].samples):
        for part in store.range_parts:  # type: ignore[attr-defined]
            try:
                episode = msgspec.json.decode(store.read(0, row, part), type=EpisodeRange)
                if episode.path not in times:
                    if not is_inside(episode.path):
                        raise ShardError(f"the path {episode.path!r} leads out of the folder: put the file below it")
                    with (root / episode.path).open("rb") as file, Video(file, episode.path) as video:
                        times[episode.path] = video.frame_times()
                count = round((episode.end_s - episode.begin_s) * episode.fps)
                if lacking := frames_lacking(times[episode.path], episode.begin_s, count, episode.fps):
                    fault = f"missing frames: the video has {count - lacking} of the {count} that the metadata lists"
                    yield _problem(store, name, row, part, fault)
            except ImportError:
                counts.media[NOT_DECODED] += 1
            except (SavableError, OSError) as error:
                yield _problem(store, name, row, part, f"unreadable media: {error}")


class _FileCounts:
    """Counts of what was found in a file."""

    def __init__(self, share: float) -> None:
        self.share = share  # the fraction of audio and video to decode
        self.parts, self.empty, self.nulls = Counter[str](), Counter[str](), Counter[str]()  # by part or column
        self.without_bytes = Counter[str]()  # by column, rows that name a file without having its bytes
        self.media = Counter[str]()  # unusual images and media, by reason
        self.most_parts = 0  # the largest number of parts of a sample
        self.dotted: set[tuple[str, ...]] = set()  # the parts of samples whose part names all have a dot


def _check_named_files(store: RecordStore, name: str, counts: _FileCounts) -> Iterator[Problem]:
    """Yield a problem for each column whose rows name files without their bytes."""
    for column, count in sorted(counts.without_bytes.items()):
        detail = f"the column {column!r}: {count:,} of {store.entries[0].samples:,} rows have a path and no bytes"
        yield Problem(NO_BYTES, encodable(f"{detail}; {store.fix}"), name)


def check_remote_file(folder: Path, name: str, url: str, options: CheckSettings) -> ShardReport:
    """Check a remote file: download it to an empty folder, and remove it afterwards."""
    sidecars = {sidecar for form in FORMATS for sidecar in form.sidecar_names(name)}
    session = Session.of()
    # Two files may share a sidecar, so each is downloaded to its own folder.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        local = Path(temporary)
        try:
            names = [name, *sorted(sidecars)]
            stats = session.each("stat", [(url, each, each == name) for each in names])  # only the file must exist
            for each, stat in zip(names, stats, strict=True):
                if stat is not None:  # its first value is the size
                    session.call("whole", url, each, stat[0], str(local / each))
            return check_file(local, name, options)
        except SavableError as error:
            return ShardReport(name, 0, 0, 0, [Problem("cannot be checked", str(error), name)])


def _check_row(store: RecordStore, name: str, row: int, counts: _FileCounts) -> Iterator[Problem]:
    """Count the parts of a sample, and yield a problem for each damaged one."""
    extensions = store.extensions(0, row)
    counts.most_parts = max(counts.most_parts, len(extensions))
    counts.parts.update(extensions)
    if all("." in extension for extension in extensions):
        counts.dotted.add(tuple(extensions))
    nulls, without_bytes = store.lacking(0, row)
    counts.nulls.update(nulls)
    counts.without_bytes.update(without_bytes)
    for extension in extensions:
        data, size = store.head(0, row, extension, _MOST_READ_BYTES)
        counts.empty.update([] if size else [extension])
        fault = part_fault(extension, data, counts.media) if size <= _MOST_READ_BYTES else ""
        if not fault and part_types.part_type(extension) in (*part_types.VIDEO_PARTS, *part_types.AUDIO_PARTS):
            fault = _media_fault(store, name, row, extension, counts)
        if fault:
            yield _problem(store, name, row, extension, fault)


def _media_fault(store: RecordStore, name: str, row: int, extension: str, counts: _FileCounts) -> str:
    """Return why an audio or video part cannot be decoded, or "" if it can be, or is not chosen for decoding."""
    # a hash chooses the fraction `share` of the parts, the same ones in each check
    if xxh3_64_intdigest(f"{name}\0{row}\0{extension}".encode()) >= counts.share * 2.0**64:
        return ""
    try:
        with store.open(0, row, extension) as file:
            fault, one_keyframe = media_fault(file)
    except ImportError:
        counts.media[NOT_DECODED] += 1
        return ""
    counts.media[ONE_KEYFRAME] += one_keyframe
    return fault


def _problem(store: RecordStore, name: str, row: int, extension: str, fault: str) -> Problem:
    """Return the problem of a part. `fault` is the problem's reason and detail, separated by ": "."""
    reason, _, detail = fault.partition(": ")
    offset = store.part_offset(0, row, extension)
    return Problem(reason, encodable(detail), name, encodable(store.key(0, row)), extension, offset, row)


def part_fault(extension: str, data: bytes, counts: Counter[str]) -> str:
    """Return why a part is damaged, as `reason: detail`, or "" if no damage is found.

    Unusual properties of images are added to `counts`.
    """
    if len(data) >= _LEAST_ZERO_BYTES and not data.strip(b"\0"):
        return f"zero-filled: all {len(data)} bytes are zeros"
    fault = part_types.decode_error(extension, data) or part_types.utf8_error(extension, data)
    if not fault and part_types.part_type(extension) in part_types.IMAGE_PARTS:
        counts.update(image_warnings(data))
    if not fault and part_types.part_type(extension) == "json" and (b"\\u" in data or b"\xed" in data):
        strings = json.dumps(json.loads(data), ensure_ascii=False)
        surrogate = re.search(rb"\xed[\xa0-\xbf]", strings.encode(errors="surrogatepass"))
        fault = "malformed text: a string has half of a surrogate pair" if surrogate else ""
    return fault

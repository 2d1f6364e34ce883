"""`convert`: a source into shards by one call, with every setting as an argument of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from savable_pipeline.data.stores.decompressed import UNPACKED_BYTES
from savable_pipeline.tools.convert.model import Options, Report
from savable_pipeline.tools.convert.run import Progress, run_conversion
from savable_pipeline.tools.convert.sources import recognize

if TYPE_CHECKING:
    from savable_pipeline.core.job_engine import Engine


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    kind: str | None = None,
    shard_bytes: int = 256_000_000,
    shard_samples: int | None = None,
    check_images: bool = True,
    allow_outside: bool = False,
    key_field: str | None = None,
    key_end: Literal["first", "last"] | None = None,
    classes: bool = False,
    file_fields: Iterable[str] | None = None,
    files_from: str | os.PathLike[str] | None = None,
    split: Mapping[str, float | str] | None = None,
    only: Iterable[str] | None = None,
    keys: Iterable[str] | None = None,
    reshard: bool = False,
    unpacked_bytes: int = UNPACKED_BYTES,
    workers: int | None = None,
    engine: Literal["ray"] | Engine | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write the samples of a source as WebDataset shards, as `savable convert` does: the same bytes.

    Damaged samples are left out and reported. The same call after one that was stopped continues it, and ends with
    the same bytes; after one that is done it writes nothing. With several processes a program needs the usual
    `if __name__ == "__main__":`.

    Args:
        source: A folder of files, JSONL, JSON, CSV, MDS, LitData, Parquet, Arrow or tars; or, as a str, a URL of some.
        target: The folder for the shards, made if it is missing; or, as a str, a URL (s3, gs, az).
        kind: What the source is, one of the words of `--as`. Default: found by its marks.
        shard_bytes: A shard is full before it grows longer than this, in bytes.
        shard_samples: A shard is full before it holds more samples than this. Default: no limit.
        check_images: Whether each image is decoded, and the headers of each sound and film are read where PyAV is
            installed; those that fail are rejected.
        allow_outside: Whether files outside the source that links or fields lead to are taken.
        key_field: Of records, the field with a sample's key. Default: the number of its record.
        key_end: The dot of a file's name that ends the key; with "last", dots before it become "_". None: the first,
            and an error where that seems to merge files that are samples of their own.
        classes: Of a folder, whether the name of a sample's deepest folder becomes its part `cls`, as a number: the
            place of the name in `classes.json`, a list that is written beside the shards.
        file_fields: Of records, the fields that name files, as "field" or "field=part"; none if empty. Default: the
            usual names.
        files_from: The folder that these fields are relative to, or that has the files which rows of Parquet and
            Arrow name without their bytes. Default: that of the source.
        split: Names and shares that add up to 1, such as {"train": 0.98, "val": 0.02}, by the hash of the keys.
        only: The parts to keep, such as ["jpg", "txt"]. Default: all.
        keys: The keys of the samples to keep. Default: all.
        reshard: Needed for tars, which are read as they are: write their samples into new shards.
        unpacked_bytes: The most bytes that a compressed shard, chunk, record, JSON array or line may become.
        workers: Processes that write; with `engine="ray"` the most tasks at a time. Default: one per core, but one for
            less than 100 MB.
        engine: "ray" for the nodes of a Ray cluster, on storage that they share with this machine. Default: processes
            of this machine.
        progress: Called with the samples done, all of them, and the bytes done.

    Returns:
        What was written: `samples`, `shards` and `size` in bytes; what was left out: `rejected`, each with `file`,
        `key`, `reason` and `detail`, and `hidden`, the number of hidden files and folders; `warnings`, texts; `nulls`,
        by column the number of rows without a value; `already`, whether all of it had been written before.

    Raises:
        ValueError: A setting is wrong, or the source cannot be converted.
        SavableError: `target` holds anything but this conversion, its disk is full, or the source changed meanwhile.
        RemoteError: A bucket or a web server cannot be read or written.
        OSError: A file cannot be read or written.

    Example:
        >>> report = sp.convert("shards/", "smaller/", reshard=True, shard_samples=100)
        >>> report.samples, report.shards, report.rejected
        (400, 4, [])
        >>> len(sp.open_dataset("smaller/"))
        400
    """
    options = Options(
        shard_bytes=shard_bytes,
        shard_samples=shard_samples,
        check_images=check_images,
        allow_outside=allow_outside,
        key_field=key_field,
        key_end=key_end,
        classes=classes,
        file_fields=_listed("file_fields", file_fields),
        split=tuple((name, _share(share)) for name, share in (split or {}).items()),
        only=_parts(only),
        unpacked_bytes=unpacked_bytes,
    )
    found = recognize(source if isinstance(source, str) else Path(source), kind)
    with _engine_of(engine, workers) as cluster:
        return run_conversion(
            found,
            target if isinstance(target, str) else Path(target),
            options,
            files_from=None if files_from is None else Path(files_from),
            keys=_listed("keys", keys),
            reshard=reshard,
            workers=workers,
            engine=cluster,
            progress=progress or _ignored,
        )


def _listed(name: str, texts: Iterable[str] | None) -> tuple[str, ...] | None:
    """Raises ValueError for one str, whose letters would be taken for the texts."""
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list, not one str: give [{texts!r}]")
    return None if texts is None else tuple(texts)


def _parts(only: Iterable[str] | None) -> tuple[str, ...]:
    names = _listed("only", only)
    if names == ():
        raise ValueError("only names no part; expected extensions, such as jpg and txt, or None to keep all")
    return names or ()


def _share(share: float | str) -> str:
    """A share as the command takes it: 0.00001, never 1e-05."""
    return share if isinstance(share, str) else f"{Decimal(str(share)):f}"


@contextlib.contextmanager
def _engine_of(engine: Literal["ray"] | Engine | None, workers: int | None) -> Iterator[Engine | None]:
    if engine is None or not isinstance(engine, str):
        yield engine
        return
    if engine != "ray":
        raise ValueError(f'engine must be "ray", or None for processes of this machine, not {engine!r}')
    from savable_pipeline.tools.convert.ray_engine import RayEngine  # only who asks for it needs Ray

    with RayEngine(workers) as cluster:
        yield cluster


def _ignored(done: int, total: int, size: int) -> None:
    """Nobody asked for the progress."""

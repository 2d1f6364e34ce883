"""The index and Energon's metadata of a folder with finished shards."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from savable_pipeline.core.files import replace_file
from savable_pipeline.data.shards.index import ShardTable
from savable_pipeline.data.shards.index_making import write_index
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.shards.metadata import INDEX_NAME, META
from savable_pipeline.data.shards.part_types import IMAGE_PARTS
from savable_pipeline.data.shards.tar_format import TarIndex
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.tools.convert.shard_series import room_on


def describe(folder: Path) -> None:
    """Index the new shards, and write Energon's files next to the index.

    Raises `ShardError`, OSError, and `SavableError` if the index cannot be written next to the shards.
    """
    with room_on(folder):
        for stale in folder.rglob("*.tar.idx.*.tmp"):  # remains of a killed process; no other process writes here
            stale.unlink(missing_ok=True)
        path, _ = index_files(folder, TARS)
        # the index is in this user's cache, where others do not look
        if path.resolve() != (folder / INDEX_NAME).resolve():
            raise OSError(errno.ENOSPC, f"no room for {INDEX_NAME}")
        index = describe_indexed(folder, path)
        for entry in index.shards:
            offsets = folder / f"{entry.name}.idx"
            if not entry.fault and not offsets.exists():
                raise OSError(errno.ENOSPC, f"no room for {offsets.name}")


def describe_tables(folder: Path, work: Path, tables: Iterable[ShardTable], *described: Any) -> None:
    """Write the index of these tables, and Energon's files next to it.

    The index is written in the folder `work`, and moved. The other arguments are those of `_write_energon_files`.
    """
    write_index(work / "savable.index", tables, TARS)
    (work / "savable.index").replace(folder / INDEX_NAME)
    _write_energon_files(folder, *described)


def describe_indexed(folder: Path, index_path: Path) -> TarIndex:
    """Write Energon's files of a folder that has an index."""
    index = TarIndex(index_path)
    counts = {entry.name: entry.samples for entry in index.shards}
    _write_energon_files(folder, counts, {frozenset(layout.member_of) for layout in index.layouts}, frozenset(), ())
    return index


_VERSION = "7.4.1"  # version of Energon with this layout


def _write_energon_files(
    folder: Path,
    counts: dict[str, int],
    layouts: Iterable[frozenset[str]],
    texts: frozenset[str],
    splits: Sequence[str],
) -> None:
    """Write Energon's metadata.

    `counts` has the number of samples in each shard, `layouts` the sets of extensions of samples, and `texts` the
    fields of `json` that are strings in every sample. The shards of each of the `splits` have its name as prefix.
    Without splits, all shards are for training.
    """
    info = {"energon_version": _VERSION, "shard_counts": counts}
    members = {split: [name for name in counts if name.startswith(f"{split}-")] for split in splits}
    parts = "".join(_split(split, names) for split, names in (members or {"train": list(counts)}).items())
    files = {
        ".info.json": json.dumps(info, indent=2),
        "split.yaml": f"split_parts:\n{parts}exclude: []\n",
        "dataset.yaml": _dataset(list(layouts), texts),
    }
    for name, content in files.items():
        replace_file(folder / META / name, [content.encode()], sync=True)


def _split(split: str, names: list[str]) -> str:
    if not names:
        return f"  {split}: []\n"
    return f"  {split}:\n" + "".join(f"  - {json.dumps(name)}\n" for name in names)


def _dataset(layouts: list[frozenset[str]], texts: frozenset[str]) -> str:
    """Return dataset.yaml: captioned images if every sample is one, otherwise crude samples for a cooker."""
    images = [image for image in IMAGE_PARTS if any(image in layout for layout in layouts)]
    caption = _caption(layouts, texts)
    if caption is None or not all(layout.intersection(images) for layout in layouts):
        return "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    fields = {"image": ",".join(images), "caption": caption}
    mapped = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in fields.items())
    sample = "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
    return f"{sample}field_map:\n{mapped}"


def _caption(layouts: list[frozenset[str]], texts: frozenset[str]) -> str | None:
    if all("txt" in layout for layout in layouts):
        return "txt"
    return f"json[{min(texts)}]" if texts else None

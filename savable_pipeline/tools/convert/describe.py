"""The index and Energon's metadata of a folder with finished shards."""

from __future__ import annotations

import errno
import json
from collections.abc import Collection, Sequence
from pathlib import Path

from savable_pipeline.core.files import replace_file
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
        for stale in folder.rglob("*.tar.idx.*.tmp"):  # a killed process left them, and no other process writes here
            stale.unlink(missing_ok=True)
        path, _ = index_files(folder, TARS)
        # an index in this user's cache, because of a full disk, is invisible to other users
        if path.resolve() != (folder / INDEX_NAME).resolve():
            raise OSError(errno.ENOSPC, f"no room for {INDEX_NAME}")
        for entry in write_energon_files(folder, path).shards:
            offsets = folder / f"{entry.name}.idx"
            if not entry.fault and not offsets.exists():
                raise OSError(errno.ENOSPC, f"no room for {offsets.name}")


_VERSION = "7.4.1"  # version of Energon with this layout


def write_energon_files(
    folder: Path, index_path: Path, texts: Collection[str] = (), splits: Sequence[str] = ()
) -> TarIndex:
    """Write Energon's metadata of a folder that has an index, and return the index.

    Args:
        folder: The folder of the shards.
        index_path: The path of their index.
        texts: The fields of `json` that are strings in every sample.
        splits: The names of the splits, which are prefixes of the names of their shards. By default, all shards are for
            training.
    """
    index = TarIndex(index_path)
    counts = {entry.name: entry.samples for entry in index.shards}
    layouts = [frozenset(layout.member_of) for layout in index.layouts]
    members = {split: [name for name in counts if name.startswith(f"{split}-")] for split in splits}
    parts = "".join(_split(split, names) for split, names in (members or {"train": list(counts)}).items())
    files = {
        ".info.json": json.dumps({"energon_version": _VERSION, "shard_counts": counts}, indent=2),
        "split.yaml": f"split_parts:\n{parts}exclude: []\n",
        "dataset.yaml": _dataset(layouts, texts),
    }
    for name, content in files.items():
        replace_file(folder / META / name, [content.encode()], sync=True)
    return index


def _split(split: str, names: list[str]) -> str:
    """Return the lines of split.yaml for one split."""
    if not names:
        return f"  {split}: []\n"
    return f"  {split}:\n" + "".join(f"  - {json.dumps(name)}\n" for name in names)


def _dataset(layouts: list[frozenset[str]], texts: Collection[str]) -> str:
    """Return dataset.yaml: captioned images if every sample is one, otherwise crude samples for a cooker."""
    images = [image for image in IMAGE_PARTS if any(image in layout for layout in layouts)]
    caption = _caption(layouts, texts)
    if caption is None or not all(layout.intersection(images) for layout in layouts):
        return "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
    fields = {"image": ",".join(images), "caption": caption}
    mapped = "".join(f"  {name}: {json.dumps(value)}\n" for name, value in fields.items())
    sample = "sample_type:\n  __module__: megatron.energon\n  __class__: CaptioningSample\n"
    return f"{sample}field_map:\n{mapped}"


def _caption(layouts: list[frozenset[str]], texts: Collection[str]) -> str | None:
    """Return the part or the field of `json` that is a caption in every sample, or None."""
    if all("txt" in layout for layout in layouts):
        return "txt"
    return f"json[{min(texts)}]" if texts else None

"""The files below `.nv-meta/` by which Megatron-Energon loads a folder of shards."""

from __future__ import annotations

import json
from collections.abc import Iterable

from savable_pipeline.data.shards.part_types import IMAGE_PARTS

_VERSION = "7.4.1"  # of Energon, whose layout this is


def energon_files(
    counts: dict[str, int],
    layouts: Iterable[frozenset[str]],
    texts: frozenset[str] = frozenset(),
    splits: tuple[str, ...] = (),
) -> dict[str, str]:
    """Name and content of each file.

    `counts` holds the samples of each shard, `layouts` the sets of extensions that samples have, `texts` the
    fields of the part `json` that are a text in every sample. The shards of each of the `splits` are named after it;
    without any all are for training.
    """
    info = {"energon_version": _VERSION, "shard_counts": counts}
    members = {split: [name for name in counts if name.startswith(f"{split}-")] for split in splits}
    parts = "".join(_split(split, names) for split, names in (members or {"train": list(counts)}).items())
    return {
        ".info.json": json.dumps(info, indent=2),
        "split.yaml": f"split_parts:\n{parts}exclude: []\n",
        "dataset.yaml": _dataset(list(layouts), texts),
    }


def _split(split: str, names: list[str]) -> str:
    if not names:
        return f"  {split}: []\n"
    return f"  {split}:\n" + "".join(f"  - {json.dumps(name)}\n" for name in names)


def _dataset(layouts: list[frozenset[str]], texts: frozenset[str]) -> str:
    """Captioned images where every sample is one; anything else crude: as it is, for a cooker."""
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

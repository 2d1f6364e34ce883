"""The files below `.nv-meta/` by which Megatron-Energon loads a folder of shards."""

from __future__ import annotations

import json
from collections.abc import Iterable

_VERSION = "7.4.1"  # of Energon, whose layout this is
_IMAGES = (
    "jpg",
    "jpeg",
    "png",
    "webp",
    "gif",
    "bmp",
    "tiff",
    "tif",
)  # in the order in which Energon tries them


def energon_files(counts: dict[str, int], layouts: Iterable[frozenset[str]], texts: frozenset[str]) -> dict[str, str]:
    """Name and content of each file.

    `counts` holds the samples of each shard, `layouts` the sets of extensions that samples have, `texts` the
    fields of the part `json` that are a text in every sample.
    """
    info = {"energon_version": _VERSION, "shard_counts": counts}
    names = "".join(f"  - {json.dumps(name)}\n" for name in counts)
    return {
        ".info.json": json.dumps(info, indent=2),
        "split.yaml": f"split_parts:\n  train:\n{names}exclude: []\n",
        "dataset.yaml": _dataset(list(layouts), texts),
    }


def _dataset(layouts: list[frozenset[str]], texts: frozenset[str]) -> str:
    """Captioned images where every sample is one; anything else crude: as it is, for a cooker."""
    images = [image for image in _IMAGES if any(image in layout for layout in layouts)]
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

"""The format of Arrow IPC files and streams, also in folders of HF `datasets`.

    save_to_disk      state.json names the files; for a DatasetDict, dataset_dict.json names a folder for each split
    the cache         dataset_info.json names the splits, which share a folder; cache-*.arrow are results of `map`

Only its store imports pyarrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from savable_pipeline.core.wording import counted, listed
from savable_pipeline.data.shards.index import Format, IndexedFiles, marker_object
from savable_pipeline.data.stores.arrow_file import arrow_matches_index, read_arrow_table
from savable_pipeline.data.stores.grouped_store import COLUMNAR_SETTINGS
from savable_pipeline.data.stores.ranges import with_media


def open_arrow(found: IndexedFiles, **settings: Any) -> Any:
    """Open the store of Arrow files."""
    from savable_pipeline.data.stores import arrow_store

    has_ranges = settings.get("ranges") is not None
    return (arrow_store.RangedArrowStore if has_ranges else arrow_store.ArrowStore)(found, **settings)


# names of the metadata files of HF `datasets`
STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def _is_saved(heads: Mapping[str, bytes]) -> bool:
    """Return whether HF's `save_to_disk` wrote the folder."""
    return "splits" in marker_object(heads, SPLITS) or "_data_files" in marker_object(heads, STATE)


def _data_files(heads: Mapping[str, bytes]) -> list[tuple[str, ...]] | None:
    """Return the files that HF's metadata lists as data, or None without metadata.

    Raises ValueError for several splits, because the user must choose one.
    """
    if SPLITS in heads:
        names = _split_names(marker_object(heads, SPLITS))
        raise ValueError(f"{counted(len(names), 'split')}, {listed(names)}. Read the folder of one, such as {names[0]}")
    state = marker_object(heads, STATE)
    if state.get("_indices_files"):
        raise ValueError("an index table selects its rows. Save it after `flatten_indices()`")
    if "_data_files" in state:
        return [(str(file["filename"]),) for file in state["_data_files"]]
    if len(names := _split_names(marker_object(heads, INFO))) > 1:
        raise ValueError(f"several splits, {listed(names)}. Name the files of one, such as '*-{names[0]}*.arrow'")
    return None


def _split_names(info: dict[str, Any]) -> list[str]:
    splits = info.get("splits")
    return [str(name) for name in splits] if isinstance(splits, list | dict) and splits else ["train"]


ARROW = Format(
    "arrow",
    (".arrow", ".feather", ".ipc"),
    read_arrow_table,
    open_arrow,
    COLUMNAR_SETTINGS,
    {"partial": True},
    is_same=arrow_matches_index,
    markers=(STATE, INFO, SPLITS),
    claims=_is_saved,
    listed=_data_files,
    by_setting={"ranges": partial(with_media, variant="ranges")},
    no_rows=bytes(16),
)

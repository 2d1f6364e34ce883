"""What people name where a dataset is wanted, and what makes one of it: raw files, tables, files of another reader."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

_READERS = {".tar": "sp.TarShardReader", ".parquet": "custom.ParquetReader", ".arrow": "custom.ArrowReader"}
_PARTS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".txt")


def instead_of_folder(folder: Path) -> str:
    """How a folder without shards of the wanted kind becomes a dataset, or is one; "" for an empty one."""
    holds_files = False
    for _, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in files if not name.startswith(".")):
            holds_files = True
            reader = _READERS.get(os.path.splitext(name)[1])  # noqa: PTH122  # a Path per name is slow
            if reader is not None:
                return f"; {name} is there, which {reader} reads"
    return f"; `savable convert {shlex.quote(str(folder))} DST` makes a dataset of its files" if holds_files else ""


def into_folder(folder: str | Path) -> str:
    """The command that fills a folder for tars, which is empty or missing."""
    return f"; `savable convert SRC {shlex.quote(str(folder))}` writes shards there of the files or the table SRC"


def instead_of_file(path: Path) -> str:
    """The command that makes tars of the folder of a picture or a text; "" for any other file."""
    if path.name.lower().endswith(_PARTS):
        return f"`savable convert {shlex.quote(str(path.parent))} DST` makes a dataset of its folder"
    return ""

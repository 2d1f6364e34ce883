"""Folders that HF `datasets` writes: what of them is one split, and which of their files are its data.

save_to_disk      state.json names the files; of a DatasetDict, dataset_dict.json names a folder for each split
the cache         dataset_info.json names the splits, whose files lie side by side; cache-*.arrow are results of map
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from savable_pipeline.core.wording import listed
from savable_pipeline.data.shards.paths import is_inside
from savable_pipeline.errors import ShardError

T = TypeVar("T")
_LARGEST = 1 << 26


class _File(msgspec.Struct):
    filename: str


class _State(msgspec.Struct):
    files: list[_File] = msgspec.field(default=[], name="_data_files")
    indices: Any = msgspec.field(default=None, name="_indices_files")


class _Splits(msgspec.Struct):
    splits: Any = None


def data_files(files: T) -> T | list[Path]:
    """What to read for a folder that HF `datasets` wrote: the files that it names. Anything else is returned as it is.

    Raises `ShardError` for a folder of several splits: one of them must be named.
    """
    if not isinstance(files, str | os.PathLike) or not Path(files).is_dir():
        return files
    folder = Path(files)
    if (folder / "dataset_dict.json").is_file():
        names = _names(_read(folder / "dataset_dict.json", _Splits).splits)
        raise ShardError(f"{folder}: holds the splits {listed(names)}; read one of them, such as {folder / names[0]}")
    if (folder / "state.json").is_file():
        return _named(folder, _read(folder / "state.json", _State))
    if (folder / "dataset_info.json").is_file():
        names = _names(_read(folder / "dataset_info.json", _Splits).splits)
        if len(names) > 1:
            raise ShardError(
                f"{folder}: holds the splits {listed(names)} side by side; name the files of one, such as "
                f"'{folder}/*-{names[0]}*.arrow'"
            )
    return files


def _named(folder: Path, state: _State) -> list[Path]:
    if state.indices:
        raise ShardError(f"{folder}: its rows are chosen by a table of indices; save it after `flatten_indices()`")
    names = [file.filename for file in state.files]
    outside = next((name for name in names if not is_inside(name)), None)
    if outside is not None:
        raise ShardError(f"{folder}/state.json: it names {outside!r}, which lies outside of the folder")
    return [folder / name for name in names]


def _names(splits: Any) -> list[str]:
    return [str(name) for name in splits] if isinstance(splits, list | dict) and splits else ["train"]


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        if path.stat().st_size > _LARGEST:
            raise ShardError(f"{path}: {path.stat().st_size} bytes; at most {_LARGEST} are read")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ShardError(f"{path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ShardError(f"{path}: cannot be read: {error}") from error

"""Files that rows of a table name by a path, without their bytes: found below one folder, and read beside the rows.

{bytes: null, path: "cats/1.png"}   --files-from /data   ─▶   /data/cats/1.png
{bytes: null, path: "/data/1.png"}  --files-from /data   ─▶   /data/1.png

Nothing outside of the folder is read, wherever a path or a link leads.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from savable_pipeline.data.stores.sample_names import outside
from savable_pipeline.tools.convert.model import Files, Input, Part, SampleReader
from savable_pipeline.tools.convert.part_data import Parts, changed, file_data
from savable_pipeline.tools.convert.plan import is_kept, source_id
from savable_pipeline.tools.convert.source_file import remote_source_id

if TYPE_CHECKING:  # with pyarrow, which other sources do without
    from savable_pipeline.data.dataset.dataset import Dataset
    from savable_pipeline.data.stores.arrow_columns import NamedFile
    from savable_pipeline.data.stores.record_store import RecordStore


class FaultError(Exception):
    """Why a file that a row names is not taken: `reason: detail`."""


def file_part(folder: str, named: NamedFile) -> Part:
    """The part that a file below `folder`, a real path, becomes. Raises `FaultError`."""
    where = f"the column {named.column!r} names {named.path[:200]!r}"
    if "://" in named.path:
        raise FaultError(f"a URL, not a file: {where}")
    if not named.part:
        raise FaultError(f"no extension: {where}")
    path = str(PurePosixPath(folder, named.path))
    try:
        if ".." in PurePosixPath(named.path).parts or outside(folder, path):
            raise FaultError(f"outside the folder of the files: {where}, and --files-from {folder}")
        status = Path(path).stat()
    except (ValueError, OSError) as error:  # not there, or no name for a file
        raise FaultError(f"missing file: {where}, and there is no {path}"[:400]) from error
    if not stat.S_ISREG(status.st_mode):
        raise FaultError(f"not a regular file: {where}")
    return Part(named.part, path, status.st_size)


@dataclass(frozen=True, slots=True)
class WithNamedFiles:
    """A `SampleReader` of rows, by `rows`, and of the files below `folder` that they name: absolute paths."""

    rows: SampleReader
    folder: str  # a real path

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        self.rows.expect(samples)

    def elsewhere(self, samples: list[Files]) -> WithNamedFiles:
        """See `SampleReader.elsewhere`; the folder is on storage that the machines share."""
        return replace(self, rows=self.rows.elsewhere(samples))

    def read(self, sample: Files) -> Parts:
        """The parts of a sample by extension. Raises `SavableError` for a row or a file that is not as planned."""
        files = [part for part in sample.parts if part.path.startswith("/")]
        for part in files:
            if outside(self.folder, part.path):
                raise changed(part.path, f"a link leads out of {self.folder} now")
        rows = replace(sample, parts=tuple(part for part in sample.parts if part not in files))
        found = dict(self.rows.read(rows))
        found |= {part.extension: file_data(Path(part.path), part.extension, part.size) for part in files}
        return {part.extension: found[part.extension] for part in sample.parts}


class RowColumns:
    """What the columns of rows do not hold: nulls, and files that are named and lie below `files`."""

    def __init__(self, store: RecordStore, only: tuple[str, ...], files: Path | None) -> None:
        from savable_pipeline.data.stores.columnar_store import ColumnarStore

        self._store = store if isinstance(store, ColumnarStore) else None
        self._only = only
        self._folder = "" if files is None else os.path.realpath(files)
        self._nulls, self._named = Counter[str](), Counter[str]()
        self._media = [] if self._store is None or not only else self._store.media_named(only)

    def parts_of(self, shard: int, row: int) -> tuple[list[Part], str]:
        """The parts that files become which a row names; or why one of them cannot be taken."""
        if self._store is None:
            return [], ""
        self._nulls.update(column for column in self._store.nulls(shard, row) if self._is_asked_for(column))
        named = [each for each in self._store.named_files(shard, row) if is_kept(each.part or each.column, self._only)]
        self._named.update({each.column for each in named})
        try:
            return [file_part(self._folder, each) for each in named if self._folder], ""
        except FaultError as fault:
            return [], str(fault)

    def _is_asked_for(self, column: str) -> bool:
        """Whether what a column would hold is taken; of a null image nobody knows what its part would be called."""
        return is_kept(column, self._only) or column in self._media

    def tell(self, found: Input, dataset: Dataset) -> None:
        """Put what was counted into the input. Raises ValueError for files that are named, without their folder."""
        found.nulls = dict(self._nulls)
        if self._folder:
            found.reader = WithNamedFiles(found.reader, self._folder)
            found.source_id = remote_source_id(
                found.source_id or source_id(Path(found.root)), [source_id(Path(self._folder))]
            )
            if not self._named:
                found.warnings.append("no row names a file without its bytes: --files-from is not needed")
        elif self._named:
            counts = "; ".join(
                f"the column {column!r}: {count:,} of {dataset.count:,} rows have a path and no bytes"
                for column, count in sorted(self._named.items())
            )
            raise ValueError(
                f"{dataset.address}: {counts}. Pass --files-from FOLDER with the files, or --only for other parts"
            )

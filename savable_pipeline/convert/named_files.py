"""Files that rows of a table name by a path, without their bytes: found below one folder, and read beside the rows.

{bytes: null, path: "cats/1.png"}   --files /data   ─▶   /data/cats/1.png
{bytes: null, path: "/data/1.png"}  --files /data   ─▶   /data/1.png

Nothing outside of the folder is read, wherever a path or a link leads.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from savable_pipeline.convert.file_reader import FileReader
from savable_pipeline.convert.model import Files, Part, SampleReader
from savable_pipeline.convert.names import outside
from savable_pipeline.convert.stretches import changed

if TYPE_CHECKING:  # with pyarrow, which other sources do without
    from savable_pipeline.stores.media_columns import NamedFile


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
            raise FaultError(f"outside the folder of the files: {where}, and --files {folder}")
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

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` for a row or a file that is not as planned."""
        files = [part for part in sample.parts if part.path.startswith("/")]
        for part in files:
            if outside(self.folder, part.path):
                raise changed(part.path, f"a link leads out of {self.folder} now")
        found = self.rows.read(replace(sample, parts=tuple(part for part in sample.parts if part not in files)))
        found |= FileReader("/").read(replace(sample, parts=tuple(files)))
        return {part.extension: found[part.extension] for part in sample.parts}

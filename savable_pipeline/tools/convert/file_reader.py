"""Reads samples whose parts are files, or stretches of a file of records."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from savable_pipeline.tools.convert.model import Files, Part, SampleReader
from savable_pipeline.tools.convert.part_data import LongPart, PartData, is_long
from savable_pipeline.tools.convert.source_file import object_at, stamp_of
from savable_pipeline.tools.convert.stretches import RecordFile, changed


@dataclass(frozen=True, slots=True)
class FileReader:
    """A `SampleReader` of files below `root`, and of stretches of `records`, or of the object `url` with this stamp."""

    root: str
    records: RecordFile | None = None
    url: str = ""
    stamp: str = ""

    def expect(self, samples: list[Files]) -> None:
        """See `SampleReader.expect`."""
        parts = [part for sample in samples for part in sample.parts]
        stretches = [(part.offset, part.size) for part in parts if self.url and part.offset is not None]
        if stretches:
            object_at(self.url, self.stamp).expect(stretches)

    def elsewhere(self, samples: list[Files]) -> FileReader:
        """See `SampleReader.elsewhere`."""
        return self

    def read(self, sample: Files) -> dict[str, PartData]:
        """The parts of a sample by extension. Raises `SavableError` for files that are not as planned.

        Files of another size than planned are not, and records that were written since.
        """
        return {part.extension: self._read(part) for part in sample.parts}

    def _read(self, part: Part) -> PartData:
        if part.offset is not None and self.url:
            return object_at(self.url, self.stamp).read(part.offset, part.size)
        if part.offset is not None:
            assert self.records is not None, part.path
            return self.records.read(part.offset, part.size)
        path = Path(self.root, part.path)
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size == part.size and is_long(part.extension, size):
                return LongPart(path, 0, size)
            data = file.read()
        if len(data) != part.size:
            raise changed(path, f"expected {part.size} bytes, found {len(data)}")
        return data


def records_behind(url: str, reader: SampleReader) -> FileReader:
    """The reader of records that were copied to a URL, for machines that do not see their file."""
    assert isinstance(reader, FileReader), reader
    return replace(reader, records=None, url=url, stamp=stamp_of(url))

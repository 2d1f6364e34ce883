"""Reads samples whose parts are files, or stretches of files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from savable_pipeline.convert.model import Files, Part
from savable_pipeline.errors import SavableError


@dataclass(frozen=True, slots=True)
class FileReader:
    """A `SampleReader` of files below `root`."""

    root: str

    def read(self, sample: Files) -> dict[str, bytes]:
        """The parts of a sample by extension. Raises `SavableError` for a file of another size than planned."""
        return {part.extension: self._read(part) for part in sample.parts}

    def _read(self, part: Part) -> bytes:
        path = Path(self.root, part.path)
        with path.open("rb", buffering=0) as file:
            file.seek(part.offset or 0)
            data = file.read() if part.offset is None else file.read(part.size)
        if len(data) != part.size:
            raise changed(path, f"expected {part.size} bytes, found {len(data)}")
        return data


def changed(path: Path, found: str) -> SavableError:
    """The error for a file that is not what the plan was made from."""
    return SavableError(
        f"{path}: {found}: it changed while it was converted; leave the input as it is while converting, and convert "
        "into another folder"
    )

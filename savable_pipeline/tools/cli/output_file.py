"""The file that a command will write."""

from __future__ import annotations

from pathlib import Path


def check_output(*paths: Path | None) -> None:
    """Raises ValueError, before any work is done, for a file that could not be written: its folder is missing."""
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder; expected a name for a file, such as {path / 'page.html'}")
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent} to write it into; make it, or name another")

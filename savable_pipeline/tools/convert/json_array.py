"""Reading a JSON array, such as LLaVA's own files: each of its objects is a sample, as a line of JSONL would be.

The file is held in memory while it is read; shards are written from the stretches of it that hold the objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from savable_pipeline.tools.convert.jsonl import BOM, Lines, read_records
from savable_pipeline.tools.convert.model import Input
from savable_pipeline.tools.convert.source_file import open_source


def read_json_array(lines: Lines) -> Input:
    """The samples of a file that holds one list. Raises OSError, and ValueError if it is not one to its end."""
    with open_source(lines.path) as file:
        data = file.read()
    found = read_records(lines, _elements(lines.name, data))
    found.digest = hashlib.sha256(data).hexdigest()
    return found


def _elements(name: str, data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Number, bytes and offset of each element, counted from 1."""
    begin = len(BOM) if data.startswith(BOM) else 0
    try:
        elements = msgspec.json.decode(memoryview(data)[begin:], type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ValueError(f"{name}: not a whole list of objects: {error}") from error
    for number, element in enumerate(elements, 1):
        raw = bytes(element)
        begin = data.index(raw, begin)  # only commas and blanks lie between two elements
        yield number, raw, begin
        begin += len(raw)

"""`YamlEntry`: a mapping in a YAML file that may come from anybody, with the line of each key for errors."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST_VALUES = 100_000  # of a file, aliases counted each time
_MOST_BYTES = 1 << 22


class YamlEntry:
    """A mapping in the YAML file, with the line of each of its keys."""

    def __init__(self, file: Path, node: Any, value: Any, line: int) -> None:
        self.file = file
        self.line = line
        if not isinstance(value, dict):
            raise self.wrong(f"a mapping is expected here, not {reprlib.repr(value)}")
        self.value: dict[Any, Any] = value
        self._nodes: dict[Any, tuple[int, Any]] = {}
        for key, inner in node.value:
            name, at = key.value, key.start_mark.line + 1
            if name in self._nodes:
                raise self.wrong(f"{name!r} is there twice, first in line {self._nodes[name][0]}", at)
            self._nodes[name] = at, inner

    def line_of(self, name: str) -> int:
        """The line of a key; that of the mapping if there is no such key."""
        return self._nodes[name][0] if name in self._nodes else self.line

    def entries(self) -> Iterator[tuple[str, YamlEntry]]:
        """The mappings in this one, by name."""
        for name, value in self.value.items():
            if str(name) not in self._nodes:
                raise self.wrong(f"the name {name!r} is not a text; write it in quotes")
            line, node = self._nodes[str(name)]
            yield str(name), YamlEntry(self.file, node, value, line)

    def inner(self, name: str) -> YamlEntry:
        """The mapping under a key."""
        return YamlEntry(self.file, self._nodes[name][1], self.value[name], self.line_of(name))

    def items(self, name: str) -> list[YamlEntry]:
        """The mappings in the list under a key. Raises ValueError if there is no list, or an empty one."""
        value, (line, node) = self.value[name], self._nodes[name]
        if not isinstance(value, list) or not value:
            raise self.wrong(f"`{name}` is a list of one mapping at least, not {reprlib.repr(value)}", line)
        pairs = zip(node.value, value, strict=True)
        return [YamlEntry(self.file, each, inner, each.start_mark.line + 1) for each, inner in pairs]

    def wrong(self, message: str, line: int | None = None) -> ValueError:
        """An error with this message, the file and the line; by default the line of this mapping."""
        return _wrong(self.file, line or self.line, message)

    def wrong_at(self, name: str, message: str) -> ValueError:
        """An error with this message and the line of a key."""
        return self.wrong(message, self.line_of(name))

    def resolved(self, path: str) -> str:
        """A path in the file, which is relative to the file's folder."""
        return path if "://" in path else str(self.file.absolute().parent / path)


def read_yaml(file: Path) -> YamlEntry:
    """The mapping that a file holds. Raises ValueError, which names file and line, where it cannot be read."""
    import yaml  # type: ignore[import-untyped]  # here, so that workers need not import it

    from savable_pipeline.data.shards.yaml_limits import check_yaml, constructed

    if file.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{file}: {file.stat().st_size} bytes; a mixture has at most {_MOST_BYTES}")
    raw = file.read_bytes()
    try:
        check_yaml(raw, aliases=True, most=_MOST_VALUES, loader=yaml.SafeLoader)
        loader = yaml.SafeLoader(raw)
        try:
            node = loader.get_single_node()
            value = None if node is None else constructed(lambda: loader.construct_document(node))
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise _wrong(file, mark.line + 1 if mark else 1, str(getattr(error, "problem", error))) from error
    return YamlEntry(file, node, value, 1)


def _wrong(file: Path, line: int, message: str) -> ValueError:
    return ValueError(f"{file}, line {line}: {message}")

"""`Field`: where in a sample an encoder finds a value: `txt` is a part, `json[caption]` a field of a JSON part."""

from __future__ import annotations

import re
from typing import Any

from savable_pipeline import Sample

_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


class Field:
    """A part of a sample as text, or a field of a part as JSON: `json[meta][labels][0]`.

    The notation is that of Megatron-Energon's field maps.
    """

    def __init__(self, name: str) -> None:
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise ValueError(f"a field is a part, such as txt, or a field of one, such as json[caption], not {name!r}")
        self.name = name
        self.part = matched[1]
        self.path = re.findall(r"\[([^\[\]]+)\]", matched[2])

    def read(self, sample: Sample) -> Any:
        """The value; None where the sample has none.

        Raises UnicodeDecodeError and JSONDecodeError where a part cannot be decoded, ValueError where a step of the
        path finds neither an object nor a list.
        """
        if self.part not in sample:
            return None
        if not self.path:
            return sample.text(self.part)
        value = sample.json(self.part)
        for step in self.path:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdecimal():
                value = value[int(step)] if int(step) < len(value) else None
            elif value is not None:
                raise ValueError(f"{self.name}: [{step}] expects an object, found {type(value).__name__}")
        return value

    def read_text(self, sample: Sample) -> str | None:
        """The value, None where the sample has none. Raises ValueError where it is no text."""
        value = self.read(sample)
        if value is None or isinstance(value, str):
            return value
        raise ValueError(f"{self.name}: expected text, found {type(value).__name__} {value!r:.80}")

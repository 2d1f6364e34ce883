"""For the page of the API: Griffe shows doctests as code under `Examples:`; our docstrings have `Example:`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames the section in the docstrings that mkdocstrings collects."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Griffe calls it for each object that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

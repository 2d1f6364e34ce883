"""Filling in a template: every value is escaped, and invisible characters are spelled out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from savable_pipeline.core.wording import human_bytes
from savable_pipeline.tools.preview.page_model import visible


def render(template: str, **values: Any) -> bytes:
    """The page that a template gives with these values, UTF-8."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = human_bytes
    environment.filters["count"] = "{:,}".format
    return environment.get_template(template).render(values).encode()


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value

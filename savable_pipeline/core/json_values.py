"""`decoded_json`: JSON as Python reads it, at the speed of msgspec."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_decoded = msgspec.json.Decoder().decode


def decoded_json(raw: bytes) -> Any:
    """The result of `json.loads`, which decodes itself what msgspec refuses, such as NaN and lone surrogates.

    Raises ValueError, RecursionError.

    >>> from savable_pipeline.core.json_values import decoded_json
    >>> decoded_json(b'{"caption": "a cat", "score": NaN}')
    {'caption': 'a cat', 'score': nan}
    """
    try:
        return _decoded(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(raw)

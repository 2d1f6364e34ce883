"""`decoded_json`: the values of `json.loads`, at the speed of msgspec."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode


def decoded_json(raw: bytes) -> Any:
    """Decode JSON as `json.loads` does, which also decodes NaN and lone surrogates.

    msgspec rejects these two, so `json` decodes them. Raises ValueError, or RecursionError for deep nesting.

    >>> from savable_pipeline.core.json_values import decoded_json
    >>> decoded_json(b'{"caption": "a cat", "score": NaN}')
    {'caption': 'a cat', 'score': nan}
    """
    try:
        return _decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(raw)

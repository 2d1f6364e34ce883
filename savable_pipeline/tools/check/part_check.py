"""Checking the bytes of one part, wherever its sample lies."""

from __future__ import annotations

from collections import Counter

from savable_pipeline.data.dataset.transparency import image_has_alpha
from savable_pipeline.data.shards.part_types import IMAGE_PARTS, decode_error, part_type, utf8_error

LARGEST = 1 << 30  # bytes of a part that is decoded: no image or text is so large; a film may be
_ZEROS = 64  # bytes at least: fewer may be meant


def part_fault(extension: str, data: bytes, counts: Counter[str]) -> str:
    """Why a part cannot be right, as `reason: detail`; empty if it can. An image that has alpha is counted."""
    if len(data) >= _ZEROS and not data.strip(b"\0"):
        return f"zero-filled: all {len(data)} bytes are zeros"
    if len(data) > LARGEST:
        return ""
    fault = decode_error(extension, data) or utf8_error(extension, data)
    if not fault and part_type(extension) in IMAGE_PARTS:
        counts["with alpha"] += image_has_alpha(data)
    return fault

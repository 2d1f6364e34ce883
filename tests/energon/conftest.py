"""Energon's loaders collect garbage when they are made and iterated: a third of a second in a process of many tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_collection() -> Iterator[None]:
    """They collect none, and leave frozen what the suite froze."""
    pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")
    from megatron.energon import savable_loader
    from megatron.energon.wrappers import gc_dataset

    nothing = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    savable_loader.gc = gc_dataset.gc = nothing
    yield
    savable_loader.gc = gc_dataset.gc = gc

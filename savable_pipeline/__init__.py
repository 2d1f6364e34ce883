"""PyTorch data loading with exact resumption.

A training run that is stopped and resumed gets the same batches, bit for bit.

    tar shards ─ TarShardReader ─ ShuffleBuffer ─ Encode(TaskEncoder) ─ OnlinePacker ─ Batcher ─ SavableLoader

`sp.blend` merges several sources, before or after Encode.

`sp.read(…).shuffle(…).encode(…).pack(…).batch(…)` names these stages. The loader builds them for each lane (a logical
worker), runs all lanes in this process or in worker processes, and stores the state of each lane with every batch.
`savable_pipeline.custom` has the base classes and parts for your own stages, stores and pipelines.
"""

import importlib
from typing import Any

from savable_pipeline.public_names import public_names

__version__ = "0.1.0"
__all__, _import_name = public_names(__name__)


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use."""
    try:
        return _import_name(name)
    except AttributeError as error:
        from difflib import get_close_matches

        others = [importlib.import_module(f"{__name__}.{each}") for each in ("custom", "errors") if name[:1].isupper()]
        hints = [f" It is in {each.__name__}." for each in others if hasattr(each, name)]
        hints = hints or [f" Did you mean {similar}?" for similar in get_close_matches(name, __all__, 1)]
        raise AttributeError(f"{error}.{''.join(hints)}") from None


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})

"""Loading a dataset's settings without running its code: a class, a module or a pickled part needs `trust=True`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from megatron.energon.module_loader import ModuleLoader
from megatron.energon.typed_converter import JsonParser

from savable_pipeline.errors import EncodeError

_RESOLVE, _LOAD = "_resolve_object", "get_function"
_PICKLED = {"pkl", "pickle", "pyd", "pth", "pt"}  # the last word of a part that their decoder unpickles
_CURE = "that is code, which runs here: if you trust who made the dataset, give trust=True"
_lock = threading.Lock()


@contextlib.contextmanager
def only_energons_classes() -> Iterator[None]:
    """Within it, loading settings that name other code than classes of Energon raises TypeError."""
    resolve, load = getattr(JsonParser, _RESOLVE), getattr(ModuleLoader, _LOAD)

    def resolve_theirs(parser: Any, module_name: str, object_name: str, *rest: Any) -> Any:
        found = None
        if module_name.partition(".")[0] == "megatron" and module_name.split(".")[1:2] == ["energon"]:
            found = resolve(parser, module_name, object_name, *rest)
        if not isinstance(found, type) or not found.__module__.startswith("megatron.energon"):
            raise TypeError(f"the dataset names {module_name}.{object_name}: {_CURE}")
        return found

    def load_none(_: Any, function: str, *rest: Any, **__: Any) -> None:
        raise TypeError(f"the dataset names the function {function}: {_CURE}")

    with _lock:
        setattr(JsonParser, _RESOLVE, resolve_theirs)
        setattr(ModuleLoader, _LOAD, load_none)
        try:
            yield
        finally:
            setattr(JsonParser, _RESOLVE, resolve)
            setattr(ModuleLoader, _LOAD, load)


def check_not_pickled(names: Iterable[str], key: str) -> None:
    """Raise EncodeError for a part that the decoder would unpickle."""
    for name in names:
        if name.rpartition(".")[2].lower() in _PICKLED:
            raise EncodeError(
                f"the part {name!r} of sample {key!r} would be unpickled, and a pickle may run any code: if you trust "
                "who made the dataset, give trust=True; or decoder = None in the encoder"
            )

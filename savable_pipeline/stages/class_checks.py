"""`check_class`: what is wrong with a user's own stage, found when its class is made and not after a resume."""

from __future__ import annotations

from inspect import isfunction, signature
from typing import Any

_PAIRS = (("verify", "stores_read"), ("may_avoid", "avoid"))  # of one capability: both are asked for, or none
_GIVEN = {"BatchStage": "batches", "ItemStage": "items", "SampleStage": "samples"}
_PLACE = "savable_pipeline.stages"
_ASKED = {"count_of", "hint_rows", "map_sources", "name_branch", "ref_alone"}  # of a stage that may have them


def check_class(cls: type[Any]) -> None:
    """Raise TypeError for a stage that defines `__next__` without a `ref`, or half of a capability."""
    own = vars(cls)
    bases = cls.__mro__[:-2]  # all but `Stage` and `object`
    named = any("ref" in vars(base) or "ref" in vars(base).get("__annotations__", ()) for base in bases)
    if "__next__" in own and not named:
        kind = next((base.__name__ for base in bases if base.__name__ in _GIVEN), "ItemStage")
        raise TypeError(
            f"{cls.__name__} defines __next__ but no `ref`, so its output could not be made again after a resume. If "
            "it returns the element that it took last from its source, or drops elements, write\n"
            f"    class {cls.__name__}(custom.PassThrough, custom.{kind}):\n"
            "If it holds, reorders or merges elements, write `ref = ()` in the class, set `self.ref` in `__next__` to "
            "the ref of the element it returns (`self.source.ref` is the ref of the source's last element), and save "
            "the refs of the elements it holds"
        )
    functions = [each for each in own.values() if isfunction(each)]
    called = {name for each in functions for name in each.__code__.co_names if name not in each.__globals__}
    for name in sorted(name for name in called & _ASKED if not any(hasattr(base, name) for base in bases[1:])):
        raise TypeError(f"{cls.__name__}: not every stage has `{name}`; ask {name}(stage, …) of {_PLACE}.capabilities")
    for pair in _PAIRS:
        has = [name for name in pair if hasattr(cls, name)]
        if len(has) == 1:
            raise TypeError(
                f"{cls.__name__}: a stage with `{has[0]}` has {' and '.join(pair)}, as capabilities.py says"
            )
    if "take" in own and "deferred" not in signature(cls.take).parameters:
        raise TypeError(f"{cls.__name__}: `take(self, n)` of a stage is now `take(self, n, *, deferred=False)`")


def gives(kind: type[Any]) -> str:
    """What a stage of this class yields, in words."""
    return next((_GIVEN[base.__name__] for base in kind.__mro__ if base.__name__ in _GIVEN), "things")

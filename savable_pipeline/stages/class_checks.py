"""`check_class`: a user's own stage without a `ref` is found when its class is made, and not after a resume."""

from __future__ import annotations

from typing import Any

_GIVEN = {"BatchStage": "batches", "ItemStage": "items", "SampleStage": "samples"}


def check_class(cls: type[Any]) -> None:
    """Raise TypeError for a stage that defines `__next__` without a `ref`."""
    bases = cls.__mro__[:-2]  # all but `Stage` and `object`
    named = any("ref" in vars(base) or "ref" in vars(base).get("__annotations__", ()) for base in bases)
    if "__next__" in vars(cls) and not named:
        kind = next((base.__name__ for base in bases if base.__name__ in _GIVEN), "ItemStage")
        raise TypeError(
            f"{cls.__name__} defines __next__ but no `ref`, so its output could not be made again after a resume. If "
            "it returns the element that it took last from its source, or drops elements, write\n"
            f"    class {cls.__name__}(custom.PassThrough, custom.{kind}):\n"
            "If it holds, reorders or merges elements, write `ref = ()` in the class, set `self.ref` in `__next__` to "
            "the ref of the element it returns (`self.source.ref` is the ref of the source's last element), and save "
            "the refs of the elements it holds"
        )


def gives(kind: type[Any]) -> str:
    """What a stage of this class yields, in words."""
    return next((_GIVEN[base.__name__] for base in kind.__mro__ if base.__name__ in _GIVEN), "things")

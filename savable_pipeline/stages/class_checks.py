"""`check_class`: what is wrong with a user's own stage, found when its class is made and not after a resume."""

from __future__ import annotations

from inspect import isfunction, signature
from typing import Any

_KINDS = ("BatchStage", "ItemStage", "SampleStage")
# Methods and properties that stages had, and what is in their place.
_GONE = {
    "take_measured": "take(n, deferred=True), and the attribute `sizes` beside it",
    "unmade": "the field `deferred` of what describe() returns",
    "leaves_out_excluded": "the field `gives_excluded` of what describe() returns",
    "make_again": "fetch_left(ref), or left_of(stage, ref) of savable_pipeline.stages.held_items",
    "keep_known": "sp.HeldItems(self).restore(refs), or known_refs(stage, refs) of savable_pipeline.stages.held_items",
    "keep_whole": "sp.HeldItems(self).restore(refs), or whole_refs(stage, refs) of savable_pipeline.stages.held_items",
}


def check_class(cls: type[Any]) -> None:
    """Raise TypeError for a stage that defines `__next__` without a `ref`, or what stages have no more."""
    own = vars(cls)
    bases = cls.__mro__[:-2]  # all but `Stage` and `object`
    named = any("ref" in vars(base) or "ref" in vars(base).get("__annotations__", ()) for base in bases)
    if "__next__" in own and not named:
        kind = next((base.__name__ for base in bases if base.__name__ in _KINDS), "ItemStage")
        raise TypeError(
            f"{cls.__name__} defines __next__ but no `ref`, so its output could not be made again after a resume. If "
            "it returns the element that it took last from its source, or drops elements, write\n"
            f"    class {cls.__name__}(sp.PassThrough, sp.{kind}):\n"
            "If it holds, reorders or merges elements, write `ref = ()` in the class, set `self.ref` in `__next__` to "
            "the ref of the element it returns (`self.source.ref` is the ref of the source's last element), and save "
            "the refs of the elements it holds"
        )
    used = set(own).union(*(each.__code__.co_names for each in own.values() if isfunction(each)))
    for name in sorted(used & _GONE.keys()):
        raise TypeError(f"{cls.__name__}: a stage has no `{name}` any more; write {_GONE[name]}")
    if "take" in own and "deferred" not in signature(cls.take).parameters:
        raise TypeError(f"{cls.__name__}: `take(self, n)` of a stage is now `take(self, n, *, deferred=False)`")

"""`restored`: a sample, a pack or a batch made again from its `__restore_key__`, to look at it.

sample   ("Ref", source, epoch, index, part)                where it comes from, as `custom.Ref`
pack     ("pack", key, number, key of each item, …)         the key of its random numbers, and its number in the lane
batch    ("batch", key, number, key of each item or pack, …)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker, seeder
from savable_pipeline.core.lane import Lane
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.ref import Ref
from savable_pipeline.errors import EncodeError
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.task_encoder import Skip
from savable_pipeline.trainers.energon.convert import as_torch_gives
from savable_pipeline.trainers.energon.encoder import FromEnergon

_seed = seeder(True)


def restored(encoder: FromEnergon, key: Any, *, seed: int) -> Any:
    """What a run with this seed made, as its loader gave it; the trainer's random generators stay as they are.

    Raises ValueError for what is no key, and EncodeError where nothing is made of a sample this time.
    """
    with as_in_a_worker(set(KINDS)):
        return as_torch_gives(_made(encoder, Encode(encoder.samples(Lane(seed=seed)), encoder), key))


def _made(encoder: FromEnergon, samples: Encode, key: Any) -> Any:
    kind: Any
    parts: list[Any]
    kind, *parts = key if isinstance(key, Sequence) and len(key) > 2 else [None]
    if kind == "Ref":
        made = samples.fetch(Ref(*parts))
    elif kind in ("pack", "batch"):
        key, number, *inner = parts
        items = [_made(encoder, samples, each) for each in inner]
        rng = Rng(0, (number, 0, 0), 0, key)
        if _seed is not None:
            _seed(key)
        made = encoder.pack(items, rng) if kind == "pack" else encoder.batch(items, rng)
    else:
        raise ValueError(
            f"{key!r} is no __restore_key__ that this dataset gave to a sample, a pack or a batch; a sample of a class "
            "of your own has one where it is derived from the sample that it was made of"
        )
    if type(made) is Skip:
        raise EncodeError(f"{kind} {tuple(parts)} makes nothing this time: it is skipped as {made.reason!r}")
    return made

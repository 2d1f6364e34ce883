"""`Decoded`: an encoder for who has none yet: each sample's parts decoded by their extension."""

from __future__ import annotations

from typing import Any

from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.task_encoder import TaskEncoder


class Decoded(TaskEncoder):
    """Makes of a sample the dict `sample.decoded()`, and of several a dict of lists, with None for a missing part.

    It draws no random numbers. To stack or crop, write an encoder of your own.

    >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), sp.Decoded())
    >>> batch = next(sp.Batcher(items, size=2))
    >>> batch["__key__"], batch["txt"], batch["png"][0].shape
    (['s000000', 's000001'], ['picture 0', 'picture 1'], (8, 8, 3))
    """

    global_rng = False
    one_to_one = True

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any]:
        """The decoded parts by extension, and `__key__`."""
        return sample.decoded()

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, list[Any]]:
        """By extension, the values of all items."""
        names = dict.fromkeys(name for item in items for name in item)
        return {name: [item.get(name) for item in items] for name in names}

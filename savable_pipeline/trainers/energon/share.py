"""`begin_at_share`: a run that Energon began, continued here at the same share of an epoch, and what that costs.

Energon's state names places in the shares of its workers, buffers and generators: none of them is here. What carries
over is how many samples have been used. The two orders differ, so of an epoch of N samples, of which a share s was
used, about N·s·(1 - s) come a second time in it, and as many not at all. The epochs after it are whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

from savable_pipeline.core.lane import Lane
from savable_pipeline.trainers.energon.dataset import EnergonDataset

log = logging.getLogger(__name__)

_DRAWN, _HELD = "_sample_count", "_restore_keys"  # in Energon's states: of a reader, and of a buffer


class AtShare(NamedTuple):
    """A dataset that begins within an epoch.

    Attributes:
        dataset: What to make the loader of; a resume of its run needs the same `skip_samples`.
        skip_samples: The samples of all ranks that are passed over.
        again: About how many samples of the epoch come a second time, and how many not at all.
    """

    dataset: EnergonDataset
    skip_samples: int
    again: int


def begin_at_share(dataset: EnergonDataset, states: Sequence[Any]) -> AtShare:
    """Return a dataset that begins where a run of Energon's stopped, as near as that can be.

    Args:
        dataset: What `get_train_dataset` returned, not begun yet.
        states: What Energon's `save_state_rank` returned on each rank.

    Raises:
        ValueError: These are no states of Energon's.

    Example:
        ```python
        import torch

        from savable_pipeline.energon import begin_at_share, get_savable_loader

        states = [torch.load(f"rank{rank}.pt", weights_only=False) for rank in range(8)]
        begun = begin_at_share(dataset, states)
        loader = get_savable_loader(begun.dataset)
        print(begun.skip_samples, begun.again)
        ```
    """
    if not states or not all(hasattr(state, "worker_states") for state in states):
        raise ValueError("states are what Energon's save_state_rank returned, one of each rank")
    used = sum(_used(state) for state in states)
    population = dataset.pipeline.encoder.samples(Lane()).info.population
    if len(dataset.pipeline.encoder.sources.leaves) == 1:
        used %= population  # whole epochs have nothing left to pass over
    share = used % population / population
    again = round(population * share * (1 - share))
    log.warning(
        "the run begins after %d samples, %.1f %% of an epoch: about %d of its %d samples come a second time in it, "
        "and as many not at all; resume it with skip_samples=%d",
        used,
        100 * share,
        again,
        population,
        used,
    )
    return AtShare(replace(dataset, pipeline=replace(dataset.pipeline, skip_samples=used)), used, again)


def _used(state: Any) -> int:
    """The samples that a rank has used: those drawn and not held, and the batches since the state was taken."""
    drawn = sum(_counts(state.worker_states, _DRAWN)) - sum(_counts(state.worker_states, _HELD))
    since = sum(getattr(worker, "offset", None) or 0 for worker in state.worker_states)
    return max(0, drawn) + since * (state.micro_batch_size or 1)


def _counts(node: Any, key: str) -> Iterator[int]:
    """The numbers under a key, or the lengths of lists, anywhere in a state."""
    if is_dataclass(node):
        node = {each.name: getattr(node, each.name) for each in fields(node)}
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == key:
                yield len(value) if isinstance(value, list | tuple) else int(value)
            else:
                yield from _counts(value, key)
    elif isinstance(node, list | tuple):
        for each in node:
            yield from _counts(each, key)

"""Megatron-Energon over the JSON tars; it imports none of this package, so that its memory can be measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def energon(
    folder: Path, *, size: int, buffer: int, workers: int = 0, rank: int = 0, world_size: int = 1,
    collate: Callable[[list[Any]], Any] = list,
) -> Iterator[Any]:  # fmt: skip
    """JSON, decoded by Energon itself, in batches that `collate` makes of a list."""
    from megatron.energon import (
        Cooker,
        DefaultTaskEncoder,
        TextSample,
        WorkerConfig,
        basic_sample_keys,
        get_savable_loader,
        get_train_dataset,
        stateless,
    )

    @stateless  # type: ignore[untyped-decorator]
    def cook(sample: Any) -> Any:
        return TextSample(**basic_sample_keys(sample), text=sample["json"])

    class Encoder(DefaultTaskEncoder):  # type: ignore[misc]
        cookers = [Cooker(cook)]  # noqa: RUF012

        @stateless  # type: ignore[untyped-decorator]
        def encode_sample(self, sample: Any) -> Any:
            return sample

        @stateless  # type: ignore[untyped-decorator]
        def batch(self, samples: list[Any]) -> Any:
            return collate(samples)

    logging.disable(logging.WARNING)
    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=workers)
    dataset = get_train_dataset(
        folder, worker_config=config, batch_size=size, shuffle_buffer_size=buffer, max_samples_per_sequence=100,
        task_encoder=Encoder(),
    )  # fmt: skip
    return iter(get_savable_loader(dataset))

"""The loader in torchtitan: `SavableDataLoader.Config` replaces its dataloader.

Each data-parallel rank saves its own lanes in torchtitan's checkpoint, under keys of its own. Any number of ranks
resumes. Tensor-, context- and pipeline-parallel processes of a rank share one decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torchtitan.components.dataloader import BaseDataLoader

from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.trainer_loader import reject_acknowledging


def inputs_and_labels(batch: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Convert a batch to the inputs and labels of torchtitan's trainer.

    The trainer passes every other field to the model as an argument, so other fields are dropped.

    Args:
        batch: A batch with `tokens` and `labels`, and optionally `position_ids`, of shape (B, T).

    Returns:
        A dict of `input`, int64 (B, T), and `positions` of the same shape, and the labels.

    Example:
        ```python
        import torch

        from savable_pipeline.trainers.torchtitan import inputs_and_labels

        inputs, labels = inputs_and_labels({"tokens": torch.tensor([[1, 2]]), "labels": torch.tensor([[2, -100]])})
        list(inputs)  # ['input']
        ```
    """
    positions = {"positions": batch["position_ids"]} if "position_ids" in batch else {}
    return {"input": batch["tokens"], **positions}, batch["labels"]


class SavableDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches and state of a loader, as torchtitan's trainer takes them.

    `Config(make=…)` is the `dataloader` of a `Trainer.Config` or a `Validator.Config`. The trainer iterates once, so
    create an endless loader (`epochs=None`) to train on.

    Args:
        config: `make` creates the `SavableLoader`. It is called in each process with the keywords `ranks`, `infinite`
            and those of `**sizes`. `convert` turns a batch into the dict with `input`, and the labels.
        dp_world_size: The number of data-parallel ranks.
        dp_rank: This rank. Processes of the same one share batches: `ranks` says so.
        **sizes: `tokenizer`, `seq_len`, `local_batch_size` and other arguments of torchtitan, passed to `make`.

    Raises:
        TypeError: `make` did not return a `SavableLoader`.

    Example:
        ```python
        from savable_pipeline.trainers.torchtitan import SavableDataLoader

        def make_loader(*, ranks, local_batch_size, **other):
            def pipeline(lane):
                return sp.Batcher(sp.TarShardReader("shards/", lane), size=local_batch_size)
            return sp.SavableLoader(pipeline, seed=7, ranks=ranks)

        config = SavableDataLoader.Config(make=make_loader)
        data = config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=64, local_batch_size=4)
        data.state_dict()["slot"]  # 0
        ```
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Config of the dataloader; the command line does not show its fields.

        Set them in the function that builds the trainer's config.
        """

        make: Annotated[Callable[..., SavableLoader], tyro.conf.Suppress]
        convert: Annotated[Callable[[Any], tuple[dict[str, Any], Any]], tyro.conf.Suppress] = inputs_and_labels
        infinite: bool = True
        """Passed to `make`; the validator sets it."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **sizes: Any) -> None:
        self.loader = config.make(ranks=_ranks(dp_rank, dp_world_size), infinite=config.infinite, **sizes)
        if not isinstance(self.loader, SavableLoader):
            raise TypeError(f"make must return a SavableLoader, not {type(self.loader).__name__}")
        reject_acknowledging(self.loader)
        self._convert = config.convert

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Any]]:
        return map(self._convert, self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch.

        The trainer fetches no batches ahead.
        """
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state_dict: The result of `state_dict()`.

        Raises:
            StateError: The state is empty, because the checkpoint lacks it.
        """
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """Stop the workers, as `SavableLoader.close`."""
        self.loader.close()


def _ranks(rank: int, world_size: int) -> Ranks:
    """Return `Ranks` for a loader whose batches are shared by all processes of its data-parallel rank. Collective."""
    if not dist.is_initialized():
        return Ranks(rank, world_size)
    rank_of_process = [0] * dist.get_world_size()  # the data-parallel rank of each process
    dist.all_gather_object(rank_of_process, rank)
    groups = [[process for process, own in enumerate(rank_of_process) if own == each] for each in range(world_size)]
    return Ranks.of((rank, world_size), share=dist.new_subgroups_by_enumeration(groups)[0])  # type: ignore[arg-type]

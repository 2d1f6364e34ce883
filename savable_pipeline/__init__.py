"""Savable data loading: a stopped and resumed training run sees the same batches, bit for bit.

    tar shards ─ TarShardReader ─ ShuffleBuffer ─ Encode(TaskEncoder) ─ OnlinePacker ─ Batcher ─ SavableLoader

`Blend` makes one stream of several before or after Encode; `BucketBatcher` batches by length what is not packed.

A pipeline is a function that builds these stages for one lane; the loader runs all lanes, in this process or in
workers, and saves where each of them is with every batch.
"""

from typing import TYPE_CHECKING, Any

from savable_pipeline.batch import Batcher
from savable_pipeline.batch_memory import empty, stack
from savable_pipeline.blend import Blend
from savable_pipeline.bucket import BucketBatcher
from savable_pipeline.encode import Encode
from savable_pipeline.encoder import Skip, TaskEncoder
from savable_pipeline.errors import (
    CheckpointMismatchError,
    EncodeError,
    RemoteError,
    SavableError,
    ShardError,
    StateError,
    WorkerError,
)
from savable_pipeline.lane import Lane
from savable_pipeline.loader import SavableLoader
from savable_pipeline.mixture import Mixture, read_mixture
from savable_pipeline.pack import OnlinePacker
from savable_pipeline.reader import TarShardReader
from savable_pipeline.rng import Rng
from savable_pipeline.sample import Ref, Sample
from savable_pipeline.shuffle import ShuffleBuffer
from savable_pipeline.stage import Stage
from savable_pipeline.state import merge_states

if TYPE_CHECKING:
    from savable_pipeline.stateful_dataset import StatefulDataset

__all__ = [
    "Batcher",
    "Blend",
    "BucketBatcher",
    "CheckpointMismatchError",
    "Encode",
    "EncodeError",
    "Lane",
    "Mixture",
    "OnlinePacker",
    "Ref",
    "RemoteError",
    "Rng",
    "Sample",
    "SavableError",
    "SavableLoader",
    "ShardError",
    "ShuffleBuffer",
    "Skip",
    "Stage",
    "StateError",
    "StatefulDataset",
    "TarShardReader",
    "TaskEncoder",
    "WorkerError",
    "empty",
    "merge_states",
    "read_mixture",
    "stack",
]


def __getattr__(name: str) -> Any:
    """`StatefulDataset` is a class of torch's, which takes seconds to import: it comes when it is asked for."""
    if name == "StatefulDataset":
        from savable_pipeline.stateful_dataset import StatefulDataset

        return StatefulDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

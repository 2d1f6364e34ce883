"""Savable data loading: a training run that is stopped and resumed sees the same batches, bit for bit.

    tar shards ─ TarShardReader ─ ShuffleBuffer ─ Encode(TaskEncoder) ─ OnlinePacker ─ Batcher ─ SavableLoader

`Blend` merges several sources, before or after Encode; `BucketBatcher` batches unpacked items of similar length.

A pipeline is a function that builds these stages for one lane (a logical worker). The loader runs all lanes, in this
process or in worker processes, and keeps the state of each lane with every batch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.blending.blend import Blend
    from savable_pipeline.blending.mixture import Mixture
    from savable_pipeline.blending.mixture_file import read_mixture
    from savable_pipeline.blending.schedule import Schedule
    from savable_pipeline.convert.shard_writer import ShardWriter
    from savable_pipeline.core.batch_memory import empty, stack
    from savable_pipeline.core.lane import Lane
    from savable_pipeline.core.rng import Rng
    from savable_pipeline.dataset.random_access import open_dataset
    from savable_pipeline.dataset.sample import Ref, Sample
    from savable_pipeline.errors import (
        CheckpointMismatchError,
        EncodeError,
        RemoteError,
        SavableError,
        ShardError,
        StateError,
        WorkerError,
    )
    from savable_pipeline.loader.open_metrics import open_metrics
    from savable_pipeline.loader.savable_loader import SavableLoader
    from savable_pipeline.loader.stateful_dataset import StatefulDataset
    from savable_pipeline.packing.balance import Balance
    from savable_pipeline.packing.packer import OnlinePacker
    from savable_pipeline.readers.arrow_reader import ArrowReader
    from savable_pipeline.readers.join import Join
    from savable_pipeline.readers.jsonl_reader import JsonlReader
    from savable_pipeline.readers.parquet_reader import ParquetReader
    from savable_pipeline.readers.reader import RecordReader
    from savable_pipeline.readers.tar_reader import TarShardReader
    from savable_pipeline.readers.token_reader import TokenReader
    from savable_pipeline.shards.part_types import IMAGE_PARTS
    from savable_pipeline.shards.shard_list import ShardEntry
    from savable_pipeline.stages.batcher import Batcher
    from savable_pipeline.stages.bucket_batcher import BucketBatcher
    from savable_pipeline.stages.cost import attention_cost
    from savable_pipeline.stages.decoded import Decoded
    from savable_pipeline.stages.encode import Encode
    from savable_pipeline.stages.item_ref import ItemRef, as_ref
    from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
    from savable_pipeline.stages.stage import BatchStage, ItemStage, PassThrough, SampleStage, Stage
    from savable_pipeline.stages.task_encoder import Skip, TaskEncoder
    from savable_pipeline.state.state_dict import merge_states
    from savable_pipeline.stores.record_store import RecordStore

__version__ = "0.1.0"

__all__ = [
    "IMAGE_PARTS",
    "ArrowReader",
    "Balance",
    "BatchStage",
    "Batcher",
    "Blend",
    "BucketBatcher",
    "CheckpointMismatchError",
    "Decoded",
    "Encode",
    "EncodeError",
    "ItemRef",
    "ItemStage",
    "Join",
    "JsonlReader",
    "Lane",
    "Mixture",
    "OnlinePacker",
    "ParquetReader",
    "PassThrough",
    "RecordReader",
    "RecordStore",
    "Ref",
    "RemoteError",
    "Rng",
    "Sample",
    "SampleStage",
    "SavableError",
    "SavableLoader",
    "Schedule",
    "ShardEntry",
    "ShardError",
    "ShardWriter",
    "ShuffleBuffer",
    "Skip",
    "Stage",
    "StateError",
    "StatefulDataset",
    "TarShardReader",
    "TaskEncoder",
    "TokenReader",
    "WorkerError",
    "as_ref",
    "attention_cost",
    "empty",
    "merge_states",
    "open_dataset",
    "open_metrics",
    "read_mixture",
    "stack",
]


# Where each name lies: a program imports what it uses, and `savable convert` starts at once.
_PLACES = {
    "IMAGE_PARTS": "shards.part_types",
    "ArrowReader": "readers.arrow_reader",
    "Balance": "packing.balance",
    "BatchStage": "stages.stage",
    "Batcher": "stages.batcher",
    "Blend": "blending.blend",
    "BucketBatcher": "stages.bucket_batcher",
    "CheckpointMismatchError": "errors",
    "Decoded": "stages.decoded",
    "Encode": "stages.encode",
    "EncodeError": "errors",
    "ItemRef": "stages.item_ref",
    "ItemStage": "stages.stage",
    "Join": "readers.join",
    "JsonlReader": "readers.jsonl_reader",
    "Lane": "core.lane",
    "Mixture": "blending.mixture",
    "OnlinePacker": "packing.packer",
    "ParquetReader": "readers.parquet_reader",
    "PassThrough": "stages.stage",
    "RecordReader": "readers.reader",
    "RecordStore": "stores.record_store",
    "Ref": "dataset.sample",
    "RemoteError": "errors",
    "Rng": "core.rng",
    "Sample": "dataset.sample",
    "SampleStage": "stages.stage",
    "SavableError": "errors",
    "SavableLoader": "loader.savable_loader",
    "Schedule": "blending.schedule",
    "ShardEntry": "shards.shard_list",
    "ShardError": "errors",
    "ShardWriter": "convert.shard_writer",
    "ShuffleBuffer": "stages.shuffle_buffer",
    "Skip": "stages.task_encoder",
    "Stage": "stages.stage",
    "StateError": "errors",
    "StatefulDataset": "loader.stateful_dataset",
    "TarShardReader": "readers.tar_reader",
    "TaskEncoder": "stages.task_encoder",
    "TokenReader": "readers.token_reader",
    "WorkerError": "errors",
    "as_ref": "stages.item_ref",
    "attention_cost": "stages.cost",
    "empty": "core.batch_memory",
    "merge_states": "state.state_dict",
    "open_dataset": "dataset.random_access",
    "open_metrics": "loader.open_metrics",
    "read_mixture": "blending.mixture_file",
    "stack": "core.batch_memory",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Savable data loading: a training run that is stopped and resumed sees the same batches, bit for bit.

    tar shards ─ TarShardReader ─ ShuffleBuffer ─ Encode(TaskEncoder) ─ OnlinePacker ─ Batcher ─ SavableLoader

`Blend` merges several sources, before or after Encode; `BucketBatcher` batches unpacked items of similar length.

A pipeline is a function that builds these stages for one lane (a logical worker). The loader runs all lanes, in this
process or in worker processes, and keeps the state of each lane with every batch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.core.batch_memory import empty, stack
    from savable_pipeline.core.lane import Lane
    from savable_pipeline.core.rng import Rng
    from savable_pipeline.data.dataset.random_access import open_dataset
    from savable_pipeline.data.dataset.ref import Ref
    from savable_pipeline.data.dataset.sample import Sample
    from savable_pipeline.data.media.clips import Clips
    from savable_pipeline.data.shards.part_types import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
    from savable_pipeline.data.shards.shard_list import ShardEntry
    from savable_pipeline.data.stores.record_store import RecordStore
    from savable_pipeline.errors import (
        CheckpointMismatchError,
        EncodeError,
        MediaError,
        RemoteError,
        SavableError,
        ShardError,
        StateError,
        WorkerError,
    )
    from savable_pipeline.run.loader.ledger import Ledger
    from savable_pipeline.run.loader.open_metrics import open_metrics
    from savable_pipeline.run.loader.savable_loader import SavableLoader
    from savable_pipeline.run.loader.stateful_dataset import StatefulDataset
    from savable_pipeline.run.state.state_dict import merge_states
    from savable_pipeline.stages.batcher import Batcher
    from savable_pipeline.stages.blending.blend import Blend
    from savable_pipeline.stages.blending.mixture import Mixture
    from savable_pipeline.stages.blending.mixture_file import read_mixture
    from savable_pipeline.stages.blending.schedule import Schedule
    from savable_pipeline.stages.bucket_batcher import BucketBatcher
    from savable_pipeline.stages.cost import attention_cost
    from savable_pipeline.stages.encode import Encode
    from savable_pipeline.stages.held_items import HeldItems
    from savable_pipeline.stages.item_ref import ItemRef, as_ref
    from savable_pipeline.stages.packing.balance import Balance
    from savable_pipeline.stages.packing.item_packer import ItemPacker
    from savable_pipeline.stages.packing.packer import OnlinePacker
    from savable_pipeline.stages.pipeline_starts import blend, join, mixture, read
    from savable_pipeline.stages.pipeline_value import Pipeline
    from savable_pipeline.stages.readers.columnar_readers import ArrowReader, ParquetReader
    from savable_pipeline.stages.readers.join import Join
    from savable_pipeline.stages.readers.reader import RecordReader
    from savable_pipeline.stages.readers.readers import JsonlReader, TarShardReader, TokenReader
    from savable_pipeline.stages.readers.record_folder_readers import LitDataReader, MdsReader
    from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
    from savable_pipeline.stages.stage import BatchStage, ItemStage, SampleStage, Stage
    from savable_pipeline.stages.stage_bases import PassThrough
    from savable_pipeline.stages.task_encoder import Decoded, Skip, TaskEncoder
    from savable_pipeline.tools.convert.conversion import convert
    from savable_pipeline.tools.convert.shard_writer import ShardWriter

__version__ = "0.1.0"

__all__ = [
    "AUDIO_PARTS",
    "IMAGE_PARTS",
    "VIDEO_PARTS",
    "ArrowReader",
    "Balance",
    "BatchStage",
    "Batcher",
    "Blend",
    "BucketBatcher",
    "CheckpointMismatchError",
    "Clips",
    "Decoded",
    "Encode",
    "EncodeError",
    "HeldItems",
    "ItemPacker",
    "ItemRef",
    "ItemStage",
    "Join",
    "JsonlReader",
    "Lane",
    "Ledger",
    "LitDataReader",
    "MdsReader",
    "MediaError",
    "Mixture",
    "OnlinePacker",
    "ParquetReader",
    "PassThrough",
    "Pipeline",
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
    "blend",
    "convert",
    "empty",
    "join",
    "merge_states",
    "mixture",
    "open_dataset",
    "open_metrics",
    "read",
    "read_mixture",
    "stack",
]


# Where each name lies: a program imports what it uses, and `savable convert` starts at once.
_PLACES = {
    "AUDIO_PARTS": "data.shards.part_types",
    "IMAGE_PARTS": "data.shards.part_types",
    "VIDEO_PARTS": "data.shards.part_types",
    "ArrowReader": "stages.readers.columnar_readers",
    "Balance": "stages.packing.balance",
    "BatchStage": "stages.stage",
    "Batcher": "stages.batcher",
    "Blend": "stages.blending.blend",
    "BucketBatcher": "stages.bucket_batcher",
    "CheckpointMismatchError": "errors",
    "Clips": "data.media.clips",
    "Decoded": "stages.task_encoder",
    "Encode": "stages.encode",
    "EncodeError": "errors",
    "HeldItems": "stages.held_items",
    "ItemPacker": "stages.packing.item_packer",
    "ItemRef": "stages.item_ref",
    "ItemStage": "stages.stage",
    "Join": "stages.readers.join",
    "JsonlReader": "stages.readers.readers",
    "Lane": "core.lane",
    "Ledger": "run.loader.ledger",
    "LitDataReader": "stages.readers.record_folder_readers",
    "MdsReader": "stages.readers.record_folder_readers",
    "MediaError": "errors",
    "Mixture": "stages.blending.mixture",
    "OnlinePacker": "stages.packing.packer",
    "ParquetReader": "stages.readers.columnar_readers",
    "PassThrough": "stages.stage_bases",
    "Pipeline": "stages.pipeline_value",
    "RecordReader": "stages.readers.reader",
    "RecordStore": "data.stores.record_store",
    "Ref": "data.dataset.ref",
    "RemoteError": "errors",
    "Rng": "core.rng",
    "Sample": "data.dataset.sample",
    "SampleStage": "stages.stage",
    "SavableError": "errors",
    "SavableLoader": "run.loader.savable_loader",
    "Schedule": "stages.blending.schedule",
    "ShardEntry": "data.shards.shard_list",
    "ShardError": "errors",
    "ShardWriter": "tools.convert.shard_writer",
    "ShuffleBuffer": "stages.shuffle_buffer",
    "Skip": "stages.task_encoder",
    "Stage": "stages.stage",
    "StateError": "errors",
    "StatefulDataset": "run.loader.stateful_dataset",
    "TarShardReader": "stages.readers.readers",
    "TaskEncoder": "stages.task_encoder",
    "TokenReader": "stages.readers.readers",
    "WorkerError": "errors",
    "as_ref": "stages.item_ref",
    "attention_cost": "stages.cost",
    "blend": "stages.pipeline_starts",
    "convert": "tools.convert.conversion",
    "empty": "core.batch_memory",
    "join": "stages.pipeline_starts",
    "merge_states": "run.state.state_dict",
    "mixture": "stages.pipeline_starts",
    "open_dataset": "data.dataset.random_access",
    "open_metrics": "run.loader.open_metrics",
    "read": "stages.pipeline_starts",
    "read_mixture": "stages.blending.mixture_file",
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
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})

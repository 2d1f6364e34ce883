"""Base classes for your own stages, stores and pipelines.

Derive stages from `SampleStage`, `ItemStage` or `BatchStage`, and stores from `RecordStore`, which a `RecordReader`
reads. A function of a lane builds a pipeline by hand from readers and stages, as a chain does. `savable_pipeline`
itself has the names that `sp.read` and a loader need.
"""

from savable_pipeline.data.dataset.ref import Ref
from savable_pipeline.data.shards.shard_list import ShardEntry
from savable_pipeline.data.stores.record_store import RecordStore
from savable_pipeline.stages.blending.mixture import Mixture
from savable_pipeline.stages.blending.mixture_file import read_mixture
from savable_pipeline.stages.bucket_batcher import BucketBatcher
from savable_pipeline.stages.item_buffer import ItemBuffer
from savable_pipeline.stages.item_ref import ItemRef, as_ref
from savable_pipeline.stages.packing.item_packer import ItemPacker
from savable_pipeline.stages.readers.join import Join
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.readers.readers import (
    ArrowReader,
    CsvReader,
    FolderReader,
    JsonlReader,
    JsonReader,
    LitDataReader,
    MdsReader,
    ParquetReader,
    TokenReader,
)
from savable_pipeline.stages.stage import BatchStage, ItemStage, PassThrough, SampleStage, Stage

__all__ = [
    "ArrowReader",
    "BatchStage",
    "BucketBatcher",
    "CsvReader",
    "FolderReader",
    "ItemBuffer",
    "ItemPacker",
    "ItemRef",
    "ItemStage",
    "Join",
    "JsonReader",
    "JsonlReader",
    "LitDataReader",
    "MdsReader",
    "Mixture",
    "ParquetReader",
    "PassThrough",
    "RecordReader",
    "RecordStore",
    "Ref",
    "SampleStage",
    "ShardEntry",
    "Stage",
    "TokenReader",
    "as_ref",
    "read_mixture",
]

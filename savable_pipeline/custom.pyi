"""Public names, one a line, for type checkers, editors and `public_names`."""

from savable_pipeline.data.dataset.ref import Ref as Ref
from savable_pipeline.data.shards.shard_list import ShardEntry as ShardEntry
from savable_pipeline.data.stores.record_store import RecordStore as RecordStore
from savable_pipeline.stages.blending.mixture import Mixture as Mixture
from savable_pipeline.stages.blending.mixture_file import read_mixture as read_mixture
from savable_pipeline.stages.bucket_batcher import BucketBatcher as BucketBatcher
from savable_pipeline.stages.item_buffer import ItemBuffer as ItemBuffer
from savable_pipeline.stages.item_ref import ItemRef as ItemRef
from savable_pipeline.stages.item_ref import as_ref as as_ref
from savable_pipeline.stages.packing.item_packer import ItemPacker as ItemPacker
from savable_pipeline.stages.readers.join import Join as Join
from savable_pipeline.stages.readers.reader import RecordReader as RecordReader
from savable_pipeline.stages.readers.readers import ArrowReader as ArrowReader
from savable_pipeline.stages.readers.readers import CsvReader as CsvReader
from savable_pipeline.stages.readers.readers import FolderReader as FolderReader
from savable_pipeline.stages.readers.readers import JsonlReader as JsonlReader
from savable_pipeline.stages.readers.readers import JsonReader as JsonReader
from savable_pipeline.stages.readers.readers import LitDataReader as LitDataReader
from savable_pipeline.stages.readers.readers import MdsReader as MdsReader
from savable_pipeline.stages.readers.readers import ParquetReader as ParquetReader
from savable_pipeline.stages.readers.readers import TokenReader as TokenReader
from savable_pipeline.stages.stage import BatchStage as BatchStage
from savable_pipeline.stages.stage import ItemStage as ItemStage
from savable_pipeline.stages.stage import PassThrough as PassThrough
from savable_pipeline.stages.stage import SampleStage as SampleStage
from savable_pipeline.stages.stage import Stage as Stage

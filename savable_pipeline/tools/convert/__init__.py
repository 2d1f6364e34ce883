"""Conversion of anything into shards; `convert` is `sp.convert`; the command calls `run_conversion`.

conversion            `sp.convert`: the whole of it             model        options, samples, parts, the report
sources, source_file  what a source is, by its marks; its bytes plan         what is taken, and into which shard it goes
read                  a source of any kind as samples           shard_job    one shard, and the faults of its samples
stored, named_files   what a store reads; files that rows name  repack       compressed tars as plain ones
writer_processes      shards that this machine writes           mirror       where it is written; a folder for a bucket
cluster, ray_engine   shards that other machines write or scan  resume       what is done already, and still right
describe              the index, and metadata for Energon       shard_writer `sp.ShardWriter`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.tools.convert.conversion import convert, run_conversion
    from savable_pipeline.tools.convert.model import Options, Report
    from savable_pipeline.tools.convert.plan import REJECTED
    from savable_pipeline.tools.convert.sources import ConversionSource, recognize

__all__ = ["REJECTED", "ConversionSource", "Options", "Report", "convert", "recognize", "run_conversion"]

# What sources are called, and the fields that name files: `savable --help` says it, and imports nothing for it.
WORDS = {
    "folder": "a folder of files",
    "jsonl": "JSONL",
    "json": "a JSON array",
    "csv": "a table (CSV or TSV)",
    "mds": "an MDS folder of Mosaic Streaming",
    "litdata": "a folder of LitData",
    "packed": "compressed tars",
    "tars": "tars",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "hf": "a folder that `save_to_disk` of HF datasets wrote",
    "hub": "a clone of a dataset of the HF hub, in Parquet",
}
FILE_FIELDS = ("image", "audio", "video", "file", "file_name")  # of records

# Where each name lies: `savable --help` and `sp.ShardWriter` import little of this folder.
_PLACES = {
    "REJECTED": "plan",
    "Options": "model",
    "Report": "model",
    "ConversionSource": "sources",
    "convert": "conversion",
    "recognize": "sources",
    "run_conversion": "conversion",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)

"""Conversion into shards: `convert` is `sp.convert`, and the command calls `run_conversion`.

conversion       the whole of it                     prepare      opens a source with the settings of the options
options          settings, report                    source       its store, its ranges of rows
sources          the kind of a source                compressed   files that are decompressed first
range_job        writes one range of rows            samples      keys and parts of rows, and rejects
shard_series     one shard after another             part_data    the check of a part
jobs             processes and machines              ray_engine   machines of a Ray cluster
finish           names, index, rejects, warnings     describe     index, and metadata for Energon
manifest         whether it is the same conversion   target       a folder or a bucket
shard_writer     `sp.ShardWriter`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.tools.convert.conversion import convert, run_conversion
    from savable_pipeline.tools.convert.options import REJECTED, Options, Report
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
    "REJECTED": "options",
    "Options": "options",
    "Report": "options",
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

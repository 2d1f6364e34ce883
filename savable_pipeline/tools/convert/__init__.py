"""Conversion into shards: `convert` is `sp.convert`, and the command calls `run_conversion`.

conversion    the whole of it                    source        the source, opened once in each process
options       settings, report, manifest         ranges        ranges of its rows, one for each job
range_job     writes one range                   samples       keys and parts of rows, and rejects
shard_series  one shard after another            part_data     the check of a part
jobs          processes and machines             ray_engine    machines of a Ray cluster
finish        names, index, rejects, warnings    describe      index, and metadata for Energon
target        a folder or a bucket               shard_writer  `sp.ShardWriter`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.tools.convert.conversion import convert, run_conversion
    from savable_pipeline.tools.convert.options import REJECTED, Options, Report
    from savable_pipeline.tools.convert.source import ConversionSource, find_files

__all__ = ["REJECTED", "ConversionSource", "Options", "Report", "convert", "find_files", "run_conversion"]

# Formats in words for people. `savable --help` prints the names and imports nothing for it.
WORDS = {
    "folder": "a folder of files",
    "jsonl": "JSONL",
    "json": "JSON arrays",
    "csv": "tables (CSV or TSV)",
    "mds": "MDS of Mosaic Streaming",
    "litdata": "LitData",
    "tar": "tars",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "lerobot": "LeRobot",
    "tokens": "token files",
}

# Where each name is: `savable --help` and `sp.ShardWriter` import little of this folder.
_PLACES = {
    "REJECTED": "options",
    "Options": "options",
    "Report": "options",
    "ConversionSource": "source",
    "convert": "conversion",
    "find_files": "source",
    "run_conversion": "conversion",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)

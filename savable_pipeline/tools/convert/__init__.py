"""Conversion of anything into shards; `convert` is `sp.convert`; the command calls `run_conversion`.

sources, folder_marks   what a source is, by its marks            model     options, samples, parts, rejects, the report
read                    a source of any kind as samples           names     what a tar can carry: names, values as bytes
folder, classes, jsonl  files; records that name files            plan      what is taken, and into which shard it goes
json_array, csv_table   other tables, as records                  shard_job one shard, and the faults of its samples
records, mds, litdata   numbered records, their fields as parts   repack    compressed tars as plain ones
stored                  what a store reads in place               mirror    where it is written; a folder for a bucket
cluster, ray_engine     shards that other machines write or scan  resume    what is done already, and still right
describe                the index, and metadata for Energon       run       the whole conversion
conversion              `sp.convert`                              shard_writer  `sp.ShardWriter`
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.tools.convert.conversion import convert
    from savable_pipeline.tools.convert.model import Options, Report
    from savable_pipeline.tools.convert.plan import REJECTED
    from savable_pipeline.tools.convert.run import run_conversion
    from savable_pipeline.tools.convert.sources import ConversionSource, recognize

__all__ = ["REJECTED", "ConversionSource", "Options", "Report", "convert", "recognize", "run_conversion"]

# Where each name lies: `savable --help` and `sp.ShardWriter` import little of this folder.
_PLACES = {
    "REJECTED": "plan",
    "Options": "model",
    "Report": "model",
    "ConversionSource": "sources",
    "convert": "conversion",
    "recognize": "sources",
    "run_conversion": "run",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name at its first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)

"""Conversion of anything into shards; `convert` is `sp.convert`; the command calls `run_conversion`.

sources, folder_marks   what a source is, by its marks            model     options, samples, parts, rejects
read                    a source of any kind as samples           plan      which samples go into which shard
folder, jsonl           files; records that name files            choose    parts, keys and splits that are taken
json_array, csv_table   other tables, as records                  shard_job one shard, and the faults of its samples
records, mds, litdata   numbered records, their fields as parts   repack    compressed tars as plain ones
stored                  what a store reads in place               run       the whole conversion, and its resume
engine, ray_engine      jobs on other machines                    elsewhere shards that other machines write or scan
mirror                  a local folder for a bucket
energon                 metadata for Megatron-Energon             shard_writer  `sp.ShardWriter`
conversion              `sp.convert`
"""

from savable_pipeline.tools.convert.conversion import convert
from savable_pipeline.tools.convert.model import Options
from savable_pipeline.tools.convert.run import REJECTED, Report, run_conversion
from savable_pipeline.tools.convert.sources import Source, recognize

__all__ = ["REJECTED", "Options", "Report", "Source", "convert", "recognize", "run_conversion"]

"""Conversion of files into shards; `convert` is what the command `savable convert` calls.

source, jsonl   what is there: names and sizes          plan    which samples go into which shard
pool            processes that write shards             shard   one shard, and its samples' faults
run             all of it, and going on after a kill    energon what Megatron-Energon wants to find
"""

from savable_pipeline.convert.run import REJECTED, Report, convert
from savable_pipeline.convert.source import Options

__all__ = ["REJECTED", "Options", "Report", "convert"]

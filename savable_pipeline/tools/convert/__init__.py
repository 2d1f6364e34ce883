"""Conversion of anything into shards; `convert` is `sp.convert`; the command calls `run_conversion`.

conversion            `sp.convert`: the whole of it             model        options, samples, parts, the report
sources, source_file  what a source is, by its marks; its bytes plan         what is taken, and into which shard it goes
read                  a source of any kind as samples           shard_job    one shard, and the faults of its samples
stored, named_files   what a store reads; files that rows name  repack       compressed tars as plain ones
writer_processes      shards that this machine writes           mirror       where it is written; a folder for a bucket
cluster, ray_engine   shards that other machines write or scan  resume       what is done already, and still right
describe              the index, and metadata for Energon       shard_writer `sp.ShardWriter`
"""

from savable_pipeline.public_names import public_names

__all__, __getattr__ = public_names(__name__)

"""Conversion into shards: `convert` is `sp.convert`.

The command calls `run_conversion`.

conversion    the whole of it                    source        the source, opened once in each process
options       settings and report                prepare       its settings, and what its store does not read
manifest      whether it is the same conversion  ranges        ranges of its rows, one for each job
range_job     writes one range                   samples       keys and parts of rows, and rejects
shard_series  one shard after another            part_data     the check of a part
jobs          processes and machines             ray_engine    machines of a Ray cluster
finish        names, index, rejects, warnings    describe      index, and metadata for Energon
target        a folder or a bucket               shard_writer  `sp.ShardWriter`
"""

from savable_pipeline.public_names import public_names

__all__, __getattr__ = public_names(__name__)

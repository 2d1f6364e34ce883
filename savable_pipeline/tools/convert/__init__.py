"""Conversion into shards: `convert` is `sp.convert`.

The command `savable convert` calls `run_conversion`.

conversion    all steps of a conversion          source        files to convert, opened once in each process
options       settings and report                prepare       settings of their store, and files that it rejects
manifest      recognizes the same conversion     ranges        ranges of rows, one for each job
range_job     writes one range                   samples       keys and parts of rows, and rejects
shard_series  one shard after another            part_data     bytes of a part, and their check
jobs          processes and machines             ray_engine    machines of a Ray cluster
finish        names, index, rejects, warnings    describe      index, and metadata for Energon
target        a folder or a bucket               shard_writer  `sp.ShardWriter`
"""

from savable_pipeline.public_names import public_names

__all__, __getattr__ = public_names(__name__)

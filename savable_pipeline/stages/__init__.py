"""The data path: one stage per file, from `TarShardReader` to `Batcher`, and the protocol they follow."""

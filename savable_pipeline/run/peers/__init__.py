"""Ranks that share one decode: the first of them builds the batches, the others get the same bytes."""

"""Ranks that share one decode.

The first of them builds the batches, and the others get the same bytes.
"""

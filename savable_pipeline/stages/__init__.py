"""Stages of a data path and their protocol.

They are readers, buffers, encoding, packing and batching.
"""

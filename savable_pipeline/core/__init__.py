"""Concepts that every folder uses: keyed random numbers, lanes, batch memory.

Nothing in this folder knows a file format or a stage.
"""

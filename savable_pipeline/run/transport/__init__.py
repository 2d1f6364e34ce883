"""Passes bytes and file descriptors between two processes.

Nothing in this folder knows samples or stages.
"""

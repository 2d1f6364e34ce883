"""Saved state of a run: the states of its lanes, and its fingerprint."""

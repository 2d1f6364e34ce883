"""The saved state of a run: the states of its lanes, and the fingerprint that a loaded state must agree with."""

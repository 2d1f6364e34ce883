"""Predicts a run before it begins: `savable plan`."""

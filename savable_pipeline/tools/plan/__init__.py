"""Plan of a run from the index, before it starts: `savable plan`."""

"""What the index says of a run before it begins: `savable plan`."""

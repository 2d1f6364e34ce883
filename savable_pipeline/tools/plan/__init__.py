"""What a run will be like, told before it begins: `savable plan`."""

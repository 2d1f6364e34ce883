"""The first stages of a data path: readers of each kind of files, in which order they read, and joins."""

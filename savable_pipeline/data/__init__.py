"""Data on disk or remote: finding files, indexing them, reading one sample."""

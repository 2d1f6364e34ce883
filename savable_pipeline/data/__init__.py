"""Where samples lie: finding files, their index, reading one sample, on a disk and behind a URL."""

"""`Blend`: several sources in one stream, with exact shares; and mixtures, which are read from a file."""

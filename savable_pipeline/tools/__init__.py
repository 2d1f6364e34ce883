"""Over the library: the command, conversion, checks, previews, plans and comparisons."""

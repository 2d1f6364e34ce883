"""Tools on top of the library: command, conversion, checks, previews, plans."""

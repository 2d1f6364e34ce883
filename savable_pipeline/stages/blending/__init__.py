"""Blending of several sources in exact proportions, and mixture files."""

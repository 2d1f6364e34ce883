"""Task encoders of public code bases: excerpts, each with its licence, commit, and what was left out."""

"""What the file of each trainer refuses, and its examples: each run in an environment that has the trainer."""

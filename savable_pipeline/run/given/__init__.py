"""Questions to a run's ledger: when a sample was given, and a batch made again."""

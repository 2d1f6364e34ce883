"""What a run was given, asked of its ledger: when a sample was given, and a batch made again."""

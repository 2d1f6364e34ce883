"""A run of the data path: lanes in workers, batches in order, states, the ledger."""

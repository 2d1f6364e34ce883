"""The ledger of a run: which samples each rank was given, written during the run, read afterwards."""

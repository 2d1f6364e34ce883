"""The ledger of a run: which samples each rank was given, written as it goes, read afterwards."""

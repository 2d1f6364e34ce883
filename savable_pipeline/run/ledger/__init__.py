"""The ledger of a run: which samples each rank got.

It is written during the run and read afterwards.
"""

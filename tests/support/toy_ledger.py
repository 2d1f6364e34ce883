"""A trainer with a ledger, to be killed: `-m tests.support.toy_ledger SHARDS LEDGER WORKERS`. It prints slots."""

from __future__ import annotations

import sys
from functools import partial

import savable_pipeline as sp
from tests.support.toy_faults import number_pipeline


def main(shards: str, ledger: str, workers: int) -> None:
    loader = sp.SavableLoader(partial(number_pipeline, shards), seed=3, lanes=12, num_workers=workers, ledger=ledger)
    for slot, _ in enumerate(loader):
        print(slot, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

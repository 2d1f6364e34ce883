"""A trainer in a process of its own, which prints its children, then continues.

The command is `python -m tests.support.toy_trainer SHARDS METHOD HOW`. HOW is "run", which takes batches until it is
ended,
and saves to SHARDS/../state.pt on Ctrl-C; "leave", which takes three and returns without closing; or "raise", in which
an
exception ends the process.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import savable_pipeline as sp
from tests.support.processes import descendants
from tests.support.streams import next_hashes
from tests.support.toy_faults import packed_numbers


def main(shards: str, method: str, how: str) -> None:
    pipeline = partial(packed_numbers, shards)
    loader = sp.SavableLoader(pipeline, seed=3, lanes=12, num_workers=2, workers=sp.Workers(start_method=method))
    next_hashes(loader, 3)
    print(*descendants(os.getpid()), flush=True)
    if how == "raise":
        raise RuntimeError("the trainer broke")
    try:
        while how == "run":
            next_hashes(loader, 1)
            time.sleep(0.01)
    except KeyboardInterrupt:
        import torch  # imported here because processes that are only killed do not need it

        state = loader.state_dict()
        torch.save({"data": state, "next": next_hashes(loader, 3)}, Path(shards).parent / "state.pt")
        print("saved", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

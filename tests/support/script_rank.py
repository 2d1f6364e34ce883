"""One rank of a page's script: `tests.support.script_rank FILE ARGUMENT …`, by `forked_ranks`."""

from __future__ import annotations

import runpy
import sys

import torch.distributed.checkpoint
import torch.nn.parallel  # noqa: F401

import savable_pipeline  # noqa: F401


def main(*command: str) -> None:
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")
    sys.stdout.flush()

"""`voted_step`: a step of all ranks of a run in one process, whose votes are taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savable_pipeline.run.loader.run import Run


class _Asked(Exception):
    """A rank has voted, and breaks its step off until the others have."""


def voted_step(runs: Sequence[Run]) -> list[Any]:
    """The batch of each rank in the next step, whose votes are taken together.

    A step that is broken off gives nothing; taken again, it goes on with what the ranks have agreed on.
    """
    agreed: list[int] = []

    def agree(vote: int) -> int:
        if not known:
            votes.append(vote)
            raise _Asked
        return known.pop()

    while True:
        votes: list[int] = []
        taken: list[Any] = []
        for run in runs:
            known, before, run.agree = list(agreed), run.agree, agree
            try:
                taken.append(run.__next__())
            except _Asked:
                pass
            finally:
                run.agree = before
        assert not taken or not votes, "some ranks vote, others do not"
        if taken:
            return taken
        agreed = [max(votes) if runs[0].settings.pad else min(votes)]

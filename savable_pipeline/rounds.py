"""`Rounds`: how long a finite epoch lasts, the same on every rank.

    round     0               1
    slot      0   1   2   3   4   5   6   7
    lane      0   1   2   3   0   1   2   3

A round takes one batch of every lane, a step one slot on each rank. The epoch ends before the first round that some
lane cannot fill, or, where batches are padded, after the last one to which some lane gives a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from savable_pipeline.errors import SavableError
from savable_pipeline.position import Position
from savable_pipeline.ranks import Ranks
from savable_pipeline.supply import Supply

log = logging.getLogger(__name__)


class Rounds:
    """Asks the lanes of a rank whether they have more, and agrees with the other ranks. `count` takes what happened."""

    def __init__(
        self, lanes: int, supply: Supply, *, pad: bool, count: Callable[[Mapping[str, int | float]], None]
    ) -> None:
        self._lanes = lanes
        self._supply = supply
        self._pad = pad
        self._count = count

    def hold_step(self, at: Position, ranks: Ranks) -> bool:
        """Whether every slot of the next step lies in a round of the epoch. Collective at the first step of a round."""
        self._probe(at)
        last_round = (at.slot + ranks.world_size - 1) // self._lanes
        while at.rounds <= last_round:
            if ranks.all_true(self.own_vote(at, ranks)) == self._pad:
                return False
            at.rounds += 1
        return True

    def own_vote(self, at: Position, ranks: Ranks) -> bool:
        """That no own lane is dry, without which there is no round; to pad, that all are, after which there is none."""
        self._probe(at)
        own = ranks.lanes(self._lanes)
        if self._pad:
            return not any(self._has_more(at, lane) for lane in own)
        return all(self._has_more(at, lane) for lane in own)

    def _probe(self, at: Position) -> None:
        """Find out what is not known of lanes: before any is asked for a batch, for then it stands elsewhere."""
        if None in at.more.values():
            for found in self._supply.probe(at):
                self._count(found.counts)

    def _has_more(self, at: Position, lane: int) -> bool:
        """Whether a lane has a batch for round `rounds`."""
        before = (at.rounds - 1) * self._lanes + lane
        if before >= at.slot:
            return self._supply.receive(at, before).more
        return bool(at.more[lane])

    def tell_what_is_left(self, at: Position, ranks: Ranks, population: int) -> None:
        """Say at an epoch's end what no one gets of it. Raises `SavableError` if it had no batch at all.

        `population`: how many samples there are.
        """
        left = at.rounds * self._lanes - at.slot
        if left and ranks.rank == 0:
            log.warning(
                "the last %d slots of epoch %d are given to no rank: %d ranks that began at a slot they do not divide "
                "would need more for a step",
                left,
                at.epoch,
                ranks.world_size,
            )
        dry = [lane for lane, more in at.more.items() if not more]
        rest = len(at.more) - len(dry)
        if at.rounds == 0:
            raise SavableError(
                f"epoch {at.epoch} has no batch: it ends before the first round that some lane cannot fill, and of "
                f"{self._lanes} lanes {dry[0] if dry else 'one of another rank'} has nothing; this is too little "
                f"data ({population} samples) for so many lanes and this batch size: give fewer lanes="
            )
        if rest and ranks.rank == 0:
            log.warning(
                "epoch %d ends after %d rounds, before the first that lane %s cannot fill; %d lanes of this rank have "
                "more, which is left out; fewer lanes leave less",
                at.epoch,
                at.rounds,
                dry[0] if dry else "(of another rank)",
                rest,
            )

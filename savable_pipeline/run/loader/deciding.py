"""`Deciding`: `decide` of a loader, and of its run, which goes on as if it had been stopped and resumed.

given   0  1  2  3 │ made ahead: 4 5 6      decide: 4, 5, 6 are thrown away, the lanes stand before 4 again,
                   │                        with the decision in their states; 4 is made anew
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from savable_pipeline.core.weights import Weight
from savable_pipeline.run.loader.decided import Excluded
from savable_pipeline.run.loader.run import Run


class Deciding:
    """Base of `SavableLoader`: what a trainer decides while it trains."""

    def __savable_run__(self) -> Run:
        """The run that the loader shows."""
        raise NotImplementedError

    def decide(
        self,
        *,
        weights: Mapping[str, Weight] | None = None,
        exclude: Iterable[Excluded] | None = None,
        max_length: int | None = None,
    ) -> int:
        """Change the run from the next step on. Call it on each rank alike, between the same two steps.

        It is as if the run was stopped here and resumed with other settings: batches made ahead are made anew. What
        was decided is in the state, so that a resume needs no change of the code, and in the ledger.

        Args:
            weights: The weight of each source of a `Blend`, named as in `sources`; instead of a `Schedule`, too.
                Samples drawn before stay in buffers.
            exclude: Keys of samples, or pairs of a source and a key, that are given no more: as with `exclude=` of a
                reader, they leave buffers and open packs, too, and rows in flight, which are closed.
            max_length: Of packs that the `OnlinePacker` begins, at most its own. Open packs keep theirs, and an item
                that was held and is longer has a pack to itself.

        Returns:
            The slot from which it holds; in later epochs of a finite run `epoch << 40 | slot`, as receipts have it.

        Raises:
            ValueError: That cannot be decided in this pipeline, or other ranks, where they can communicate, decide
                otherwise.

        Example:
            >>> def pipeline(lane):
            ...     sources = {name: sp.TarShardReader(f"shards/{name}.tar", lane) for name in "01"}
            ...     return sp.Batcher(sp.Blend(sources, weights={"0": 1, "1": 1}), size=4)
            >>> loader = sp.SavableLoader(pipeline, seed=7, lanes=2)
            >>> _ = next(loader), next(loader)
            >>> loader.decide(weights={"0": 3, "1": 1})
            2
            >>> [sample.shard for sample in next(loader)].count("0.tar")
            3
        """
        run = self.__savable_run__()
        run.check_nothing_held()
        return run.decide(weights, exclude, max_length)

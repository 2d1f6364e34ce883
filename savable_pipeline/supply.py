"""`Supply`: has the batches of a rank's slots made, by workers some batches ahead, or in this process one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

from savable_pipeline.host import Delivery, LaneHost, Want
from savable_pipeline.in_process import InProcess
from savable_pipeline.launch import Launcher, close_with, launcher
from savable_pipeline.pool import Pool
from savable_pipeline.position import Position
from savable_pipeline.stage import Stage
from savable_pipeline.trace import may_avoid, where
from savable_pipeline.worker import Job


class Supply:
    """What has been asked for and what has come, by slot. After an error it starts anew from the loader's position.

    `owner` is whom the workers die with; `pipeline` gives stages of one lane, built to be looked at.
    """

    def __init__(
        self,
        job: Job,
        host: LaneHost,
        owner: Callable[[], object],
        pipeline: Callable[[], Stage],
        *,
        num_workers: int,
        prefetch: int,
        timeout: float,
        max_restarts: int,
        context: BaseContext,
    ) -> None:
        self._job = job
        self._host = host
        self._owner = owner
        self._pipeline = pipeline
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._timeout = timeout
        self._max_restarts = max_restarts
        self._context = context
        self._asked: dict[int, Any] = {}  # slot → ticket
        self.received: dict[int, Delivery] = {}  # by slot, not yet given
        self._launcher: Launcher | None = None
        self._makers: Pool | InProcess | None = None
        self._end_launcher: Callable[[], Any] = _nothing
        self._end_makers: Callable[[], Any] = _nothing
        self._restarts = self._moves = 0  # up to the last pool that is gone

    def receive(self, at: Position, slot: int, want: Want = "batch", last: int = -1) -> Delivery:
        """The batch of a slot of this rank; waits for it. Raises what its stages raised, or `WorkerError`.

        Slots up to `last` will be wanted in the same way.
        """
        if slot not in self.received:
            with self._makers_dropped_on_error() as makers:
                if slot not in self._asked or slot < last:
                    self._ask(makers, at, slot, want, last)
                self.received[slot] = makers.answer(self._asked.pop(slot))
        return self.received[slot]

    def ask_ahead(self, at: Position) -> None:
        """Ask workers for this rank's next slots, as far as `prefetch` allows."""
        if self._num_workers:
            with self._makers_dropped_on_error() as makers:
                self._ask(makers, at, -1, "batch")

    def probe(self, at: Position) -> list[Delivery]:
        """Find out which lanes have a batch at all, where that is not known; gives what they answered."""
        with self._makers_dropped_on_error() as makers:
            unknown = [lane for lane, more in at.more.items() if more is None]
            tickets: dict[int, Any] = {lane: makers.ask(lane, at.states[lane], "probe") for lane in unknown}
            answers = {lane: makers.answer(ticket) for lane, ticket in tickets.items()}
        for lane, found in answers.items():
            at.states[lane], at.more[lane] = found.state, found.more
        return list(answers.values())

    def _ask(self, makers: Pool | InProcess, at: Position, upto: int, want: Want, last: int = -1) -> None:
        """Ask for this rank's next slots that are not asked for: to `upto` at least, then as far as `prefetch` goes.

        What is to be passed over is asked for up to `last`: what comes then is not known yet.
        """
        limit = self._prefetch * self._num_workers + (1 if self.received else 0)  # besides the one to be given now
        slot = max([at.own_slot - at.step, *self._asked, *self.received]) + at.step
        while slot <= upto or len(self._asked) + len(self.received) < limit:
            lane = slot % self._job.lanes
            if slot > upto and (at.more[lane] is False or (want == "pass" and slot > last)):
                return
            self._asked[slot] = makers.ask(lane, at.states[lane], want)
            slot += at.step

    # Who makes them.

    def launch(self) -> Launcher:
        """What starts workers: begun early, before this process has more threads or uses a GPU."""
        if self._launcher is None:
            self._launcher = launcher(self._job, self._context)
            self._end_launcher = close_with(self._owner(), self._launcher)
        return self._launcher

    def _start(self) -> Pool | InProcess:
        """The workers, started if they are not there, or what stands in for them here."""
        if self._makers is None and not self._num_workers:
            self._makers = InProcess(self._host)
            self._end_makers = self._makers.close
        elif self._makers is None:
            stage = self._pipeline()  # opens, and on first use indexes, the shards once, before there are workers
            self._makers = Pool(
                self.launch(),
                num_workers=self._num_workers,
                depth=self._prefetch,
                timeout=self._timeout,
                max_restarts=self._max_restarts,
                restarts=self._restarts,
                describe=partial(where, stage),
                may_avoid=partial(may_avoid, stage),
            )
            self._end_makers = close_with(self._owner(), self._makers)
        return self._makers

    @contextlib.contextmanager
    def _makers_dropped_on_error(self) -> Iterator[Pool | InProcess]:
        """After an error, Ctrl-C too, no one knows what the workers were asked: begin again from the state."""
        try:
            yield self._start()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """End the workers and forget what they were asked."""
        makers, end = self._makers, self._end_makers
        self._makers, self._end_makers = None, _nothing
        self._asked, self.received = {}, {}
        if makers is not None:
            self._restarts = makers.restarts
            self._moves += makers.moves
        end()

    def close(self) -> None:
        """End the workers and what starts them; they are begun again when they are needed."""
        self.drop()
        end = self._end_launcher
        self._launcher, self._end_launcher = None, _nothing
        end()

    def numbers(self) -> dict[str, int]:
        """What is ready, what the trainer holds, and what befell the workers, by name."""
        makers = self._makers
        return {
            "ready_batches": len(self.received) + (makers.ready if makers else 0),
            "viewed_batches": makers.viewed if makers else 0,
            "restarts": makers.restarts if makers else self._restarts,
            "moved_lanes": self._moves + (makers.moves if makers else 0),
        }


def _nothing() -> None:
    pass

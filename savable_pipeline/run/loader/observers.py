"""The observers of a run, in the order in which they see each step."""

from __future__ import annotations

from savable_pipeline.run.loader.ledger_keeper import Counters, LedgerKeeper
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.observer import Observer, PinnedMemory
from savable_pipeline.run.loader.prefetcher import Prefetcher
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.loader.rows_in_flight import RowsInFlight
from savable_pipeline.run.loader.settings import LoaderSettings
from savable_pipeline.run.loader.source_losses import SourceLosses
from savable_pipeline.run.loader.states import States
from savable_pipeline.run.loader.stats import Stats
from savable_pipeline.run.loader.trace import SampleIds, source_names


def new_observers(
    settings: LoaderSettings, ranks: Ranks, local: LocalLanes, states: States, prefetcher: Prefetcher
) -> list[Observer]:
    """Those that the settings ask for."""
    stats = Stats(settings.num_workers, lambda: source_names(local.last_stage))
    found: list[Observer] = [SourceLosses(local)]
    if settings.sample_ids:
        found.append(SampleIds(local, pad=settings.pad))
    if settings.pin_memory:
        found.append(PinnedMemory())
    rows = RowsInFlight(settings, ranks, local) if settings.acknowledge else None
    if rows is not None:
        found.append(rows)
    if settings.ledger is not None and ranks.builds:

        def counters() -> Counters:
            in_flight = {} if rows is None else rows.numbers()
            return {**stats.totals(), **in_flight, **prefetcher.numbers()}, stats.names()

        ledger = LedgerKeeper(settings, local, states, counters)
        ledger.noted = ledger.noted if rows is None else rows.table.noted
        found.append(ledger)
    return [*found, stats]

"""Measures loaders in turn, each in a process of its own, from full queues to full queues.

Nothing is counted that is made for another: a loader that makes batches ahead does so before and behind the measure.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from data import console
from rich.table import Table
from rounds import Loader, processor_s, spread

ROUNDS = 5
WARM, CALM_S, CALM = 2, 0.2, 0.015  # batches first; at rest is who uses so few processor seconds in this time, twice
Maker = Callable[[], Loader]


def in_turn(title: str, unit: str, makers: dict[str, Maker], batches: int) -> dict[str, Any]:
    """Rates and processor times, and their ratios to the first: medians, and the spread of rounds."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for _ in range(ROUNDS):
        for name in list(rounds):
            told = _apart(makers[name], batches)
            if isinstance(told, str):
                console.print(f"{name} is left out: {told}")
                del rounds[name]
            else:
                rounds[name].append(told)
                console.print(f"{title}, {name}: {told[0]:.1f} {unit}/s, {told[1]:.2f} ms of processor time")
    first = next(iter(rounds.values()))
    table = Table(title, f"{unit}/s", "the first / it", "spread", "processor ms", "it / the first", "spread")
    result = {}
    for name, found in rounds.items():
        rates = spread([own / its for (own, _), (its, _) in zip(first, found, strict=True)])
        costs = spread([its / own for (_, own), (_, its) in zip(first, found, strict=True)])
        rate, cost = (statistics.median(column) for column in zip(*found, strict=True))
        result[name] = {f"{unit}/s": rate, "first/it": rates, "ms": cost, "ms it/first": costs}
        cells = [cell for low, middle, high in (rates, costs) for cell in (f"{middle:.2f}", f"{low:.2f} to {high:.2f}")]
        table.add_row(name, f"{rate:,.1f}", *cells[:2], f"{cost:.2f}", *cells[2:])
    console.print(table)
    return result


def _apart(make: Maker, batches: int) -> tuple[float, float] | str:
    """Units a second and the processor's milliseconds a unit, in a process of its own; or why it cannot run."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(make, batches, sender))
    process.start()
    sender.close()
    told: tuple[float, float] | str = receiver.recv()
    process.join()
    return told


def _measured(make: Maker, batches: int, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        loader = make()
    except (ImportError, RuntimeError) as error:
        sender.send(f"{error}".splitlines()[0][:200])
        return
    for _ in range(WARM):
        next(loader.batches)
    before, _ = _at_rest()
    start = time.perf_counter()
    units = sum(loader.use(next(loader.batches)) for _ in range(batches))
    after, end = _at_rest()
    sender.send((units / (end - start), (after - before) / units * 1e3))
    loader.close()


def _at_rest() -> tuple[float, float]:
    """Processor seconds, once all queues are full, and when they became so."""
    calm, last, since = 0, processor_s(os.getpid()), time.perf_counter()
    while calm < 2:
        time.sleep(CALM_S)
        now = processor_s(os.getpid())
        calm = calm + 1 if now - last <= CALM else 0
        last, since = now, since if calm else time.perf_counter()
    return last, since

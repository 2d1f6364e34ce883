"""The default number of lanes of a run: few for small data, by the data alone.

    batches of the first epoch    960 …   480 …   240 …   80 …   40 …   20 …   fewer
    lanes of a finite run         96      48      24      8      4      2      1
    lanes of an endless run       96      48      24      8      8      8      8

So each lane has at least ten batches of a finite epoch, which with `tail="stop"` drops less than a tenth of them. With
8 lanes, 15 batches would be one round of 8, and 7 batches would be dropped. An endless run drops none, and 8 lanes
serve 8 workers or ranks. See docs/lanes.md.

The index has the number of samples, not of batches. Each sample counts as one item, also where a filter or an encoder
may drop some. All pipelines that the index cannot count, such as packs and blends, have 96 lanes.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.ranks import Ranks, check_lanes
from savable_pipeline.run.loader.settings import MOST_LANES, LoaderSettings
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.chunked_stage import is_one_to_one
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

_COUNTS = (MOST_LANES, 48, 24, 8, 4, 2)
_LEAST = 8  # of an endless run
_BATCHES = 10  # of a lane in an epoch, at least
_IDLE = "%d workers for the %d lanes of this rank: some stay idle. For a new run, use lanes=%d or more."


def with_lanes(wanted: LoaderSettings, ranks: Ranks, local: LocalLanes, lanes: int | None) -> LoaderSettings:
    """Set the number of lanes of a run, and return its settings.

    Args:
        wanted: The settings of the loader.
        ranks: The rank of this process.
        local: Builds the lanes of the run.
        lanes: The number of lanes. None: by the data.

    Raises:
        ValueError: The number does not fit the ranks or `epoch_slots`.
    """
    source = ""
    if lanes is None:
        batches, source = first_epoch_batches(local.last_stage), ", the default for this data"
        lanes = lanes_for(batches, endless=local.last_stage.info.endless)
        if batches is not None:
            log.info("lanes=%d, because an epoch has %d batches. Pass another number to a new run.", lanes, batches)
    check_lanes(ranks, lanes, source)
    settings = replace(wanted, lanes=lanes)
    local.set_lanes(lanes)
    own_lanes = lanes // ranks.world_size
    if ranks.builds and settings.num_workers > own_lanes:
        log.warning(_IDLE, settings.num_workers, own_lanes, settings.num_workers * ranks.world_size)
    return settings


def lanes_for(batches: int | None, *, endless: bool) -> int:
    """Return the lanes for an epoch of so many batches, None if unknown."""
    if batches is None:
        return MOST_LANES
    lanes = next((lanes for lanes in _COUNTS if batches >= _BATCHES * lanes), 1)
    return max(lanes, _LEAST) if endless else lanes


def first_epoch_batches(last: Stage) -> int | None:
    """Return the full batches of the first epoch, None if the index cannot tell.

    A lower bound if there are more than enough for 96 lanes.

    Args:
        last: The last stage of a lane.
    """
    reader, *steps = upstream(last)
    if not (isinstance(reader, RecordReader) and isinstance(last, Batcher)):
        return None
    if not all(is_one_to_one(step) is not None or isinstance(step, Filter) for step in steps[:-1]):
        return None
    excluded, selection = list(reader.info.excluded.numbers.get(reader.tag, ())), reader.selection
    count = reader.shares_of(0).count(0)
    if selection is not None and count - len(excluded) < _BATCHES * MOST_LANES * last.size:
        excluded = [*np.intersect1d(selection.locate(np.arange(reader.population)), excluded)]
    return max(0, count - len(excluded)) // last.size

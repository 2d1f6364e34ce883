"""Makes a batch again that a run was given, from the run's ledger and its pipeline function."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from savable_pipeline.core.run_facts import RunFacts
from savable_pipeline.errors import SavableError
from savable_pipeline.run.engine.in_process import InProcess
from savable_pipeline.run.engine.messages import LaneJob
from savable_pipeline.run.ledger.reader import LedgerFiles, RecordedBatch
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.states import NewShards
from savable_pipeline.run.state.fingerprint import compare, fingerprint, unpack_fingerprint
from savable_pipeline.run.state.lane_state import LaneState, pack_state, unpack_state
from savable_pipeline.stages.batch_samples import BatchSamples
from savable_pipeline.stages.pipeline import PipelineFunction
from savable_pipeline.stages.stage import Stage


class MadeBatch(NamedTuple):
    """A batch that was made again, the last stage of its lane, and what the ledger says of it."""

    batch: Any
    stage: Stage
    given: RecordedBatch


def make_again(pipeline: PipelineFunction, ledger: LedgerFiles, epoch: int, slot: int) -> MadeBatch:
    """The batch of a slot, byte for byte as the run was given it.

    The lane runs from its last state in the ledger, at most 1,000 batches before. Shards may have been added since, but
    all else must be as it was for the run. Raises `SavableError` if no such batch was given, or the pipeline made
    another one; `CheckpointMismatchError` if its settings or data differ.
    """
    given = ledger.batch_at(epoch, slot)
    start = given.start
    lane = slot % start.lanes
    local = LocalLanes(LaneJob(pipeline, start.seed, start.lanes, start.pad), lane)
    facts = _facts(given, local)
    at = ledger.state_before(epoch, slot)
    before, saved = (
        (lane, LaneState(lane, epoch)) if at is None else (at.slot, unpack_state(at.state, LaneState, "lane"))
    )
    state = pack_state(replace(saved, facts=facts.digest))
    makers = InProcess(local.runner)
    for _ in range((slot - before) // start.lanes):
        state = makers.answer(makers.ask(lane, state, "skip", facts)).state
    made = makers.answer(makers.ask(lane, state, facts=facts))
    last = local.runner.at_position(lane, made.state)
    assert last is not None
    _check(BatchSamples.of(made.samples), given)
    return MadeBatch(made.batch, last, given)


def _facts(given: RecordedBatch, local: LocalLanes) -> RunFacts:
    """The facts of the run at a batch, with the number of the current shards that its lanes read in each epoch.

    Raises `CheckpointMismatchError` if settings or data differ in anything but shards that were added later.
    """
    start, facts = given.start, given.facts
    saved = unpack_fingerprint(start.fingerprint)
    local.learn(facts)
    here = fingerprint(local.last_stage, seed=start.seed, lanes=start.lanes)
    new = NewShards(saved, here, local)
    compare(new.before, here)
    return replace(facts, growth=new.growth_before | facts.growth)


def _check(made: BatchSamples, given: RecordedBatch) -> None:
    """Raise `SavableError` unless the batch was made of the samples that the ledger names."""
    if made.by_row() != given.batch.samples.by_row():
        raise SavableError(
            f"slot {given.batch.slot} of epoch {given.batch.epoch}: the pipeline reads other samples than the "
            "ledger recorded. Use the code and data of the run."
        )

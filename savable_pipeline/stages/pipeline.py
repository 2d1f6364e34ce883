"""Pipelines: functions that build the stages of a lane and return the last stage."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from savable_pipeline.core.lane import Lane
from savable_pipeline.core.named_object import named_object
from savable_pipeline.data.dataset.dataset import Dataset
from savable_pipeline.data.dataset.ref import tag_of
from savable_pipeline.data.dataset.sample import Sample, sample_name
from savable_pipeline.stages.item_ref import ItemRef, sample_indices, sample_refs
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage
from savable_pipeline.stages.task_encoder import TaskEncoder

PipelineFunction: TypeAlias = Callable[[Lane], Stage]


def encoders_of(last: Stage) -> list[TaskEncoder]:
    """Return all encoders of a pipeline, including those of `.map` and `.filter`."""
    stages = [*upstream(last)]
    encoders = [stage.info.encoder for stage in stages]
    encoders += [stage.keyed.encoder for stage in stages if hasattr(stage, "keyed")]
    return [encoder for encoder in encoders if encoder is not None]


def check_pipeline(pipeline: PipelineFunction) -> None:
    """Raise ValueError unless `pipeline` can be called with one argument, a lane."""
    try:
        inspect.signature(pipeline).bind(None)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"pipeline must be sp.read(...) with its steps, or a function of one lane, not {pipeline!r}: {error}"
        ) from None


def named_pipeline(text: str) -> PipelineFunction:
    """Import and return the pipeline function that `text` names as "module:name".

    Raises errors of `named_object`, and ValueError if the object is not a pipeline function.
    """
    pipeline: PipelineFunction = named_object(text)
    check_pipeline(pipeline)
    return pipeline


_MOST_NAMED = 3  # most samples of a pack to name


def sample_names(stage: Stage, ref: ItemRef) -> str:
    """Return text that names the first samples of an item or a pack.

    It has the key and shard of each, then the number of further samples. `stage` is the stage that takes the item or
    pack from its source.
    """
    indices = list(dict.fromkeys(sample_indices(ref) if ref else ()))
    names = []
    for index in indices[:_MOST_NAMED]:
        with contextlib.suppress(Exception):  # an unreadable shard must not hide the error that the caller raises
            names.append(sample_name(sample_of(stage, (index, 0, 0))))  # the name is the same in all epochs
    more = f", and of {len(indices) - len(names)} more" if len(indices) > len(names) else ""
    return "; ".join(names) + more


def sample_of(stage: Stage, ref: ItemRef) -> Sample:
    """Return the first sample of an item or a pack.

    `stage` is the stage that takes the item or pack from its source.

    Raises StopIteration if `ref` is that of another stage's element, and errors of the reader.
    """
    sample_ref = next(sample_refs(ref))
    tag = tag_of(sample_ref[0])  # the first number is the sample's index
    reader = next(each for each in upstream(stage) if isinstance(each, RecordReader) and tag in each.info.tags)
    return reader.fetch(sample_ref)


def datasets_of(stages: Iterable[Stage]) -> list[Dataset]:
    """Return the datasets that these stages read, including joined ones."""
    return [dataset for stage in stages for dataset in getattr(stage, "datasets", ())]


def verify_files(stages: Iterable[Stage], slot: int) -> None:
    """Raise `ShardError` if a file that one of these stages reads has changed.

    `slot` is the position in the run of the batch that is yielded next.
    """
    for dataset in datasets_of(stages):
        dataset.verify(slot)
    for stage in stages:
        if isinstance(stage, RecordReader) and stage.exclude_file is not None:
            stage.exclude_file.verify()


def upstream(last: Stage) -> Iterator[Stage]:
    """Yield all stages before the stage `last`, and then `last` itself.

    Each stage comes after its sources.
    """
    for source in last.sources:
        yield from upstream(source)
    yield last

"""`BlendSources`: a stage with several named sources, which finds the source of a ref by the tag in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any

from savable_pipeline.core.global_rng import kinds
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Ref, tag_of
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.stages.capabilities import name_branch
from savable_pipeline.stages.held_items import left_of
from savable_pipeline.stages.item_ref import ItemRef, as_ref, sample_indices
from savable_pipeline.stages.stage import SampleStage, Stage
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.task_encoder import TaskEncoder


class BlendSources(Stage):
    """Base of `Blend`: the sources by name, and the source of a ref. A subclass chooses the next source."""

    def __init__(self, sources: Mapping[str, Stage]) -> None:
        check_sources(sources)
        self._stages = dict(sorted(sources.items()))  # sorted: the order of the turns must not depend on the dict's
        self.name_branch("")

    @property
    def sources(self) -> tuple[Stage, ...]:
        """The sources, in the order of their names."""
        return tuple(self._stages.values())

    def map_sources(self, change: Callable[[Stage], Stage]) -> None:
        """Replace each source by `change(source)`."""
        self._stages = {name: change(stage) for name, stage in self._stages.items()}
        self._stage_of = {tag: stage for stage in self._stages.values() for tag in stage.info.tags}

    def name_branch(self, name: str) -> None:
        """Name each source by its own name, or `name/OWN` if this Blend is the source `name` of another."""
        self._branch = name
        for own, stage in self._stages.items():
            name_branch(stage, f"{name}/{own}" if name else own)
        self._stage_of = {tag: stage for stage in self._stages.values() for tag in stage.info.tags}
        if len(self._stage_of) < sum(len(stage.info.tags) for stage in self._stages.values()):
            raise ValueError(f"Blend: two of {', '.join(self._stages)} have the same 15-bit tag; rename one")

    def describe(self) -> StageInfo:
        """One deeper than the deepest source, with the sum of their populations, and all their tags and origins."""
        infos = [stage.info for stage in self.sources]
        return StageInfo(
            infos[0].lane,
            depth=1 + max(info.depth for info in infos),
            population=sum(info.population for info in infos),
            endless=any(info.endless for info in infos),
            tags=frozenset(self._stage_of),
            origins=frozenset[int]().union(*(info.origins for info in infos)),
            branch=self._branch,
            encoder=_common([info.encoder for info in infos]),
            excluded=reduce(or_, (info.excluded for info in infos)),
            gives_excluded=any(info.gives_excluded for info in infos),
        )

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the element with this ref again. Raises `CheckpointMismatchError` if it is of none of the sources."""
        return self._source_of(ref).fetch(ref)

    def fetch_left(self, ref: ItemRef) -> tuple[Any, ItemRef]:
        """The element with this ref, and the ref of what is left of it."""
        return left_of(self._source_of(ref), ref)

    def _source_of(self, ref: ItemRef | Ref) -> Stage:
        if isinstance(ref, Ref):
            for stage in self.sources:
                if ref.source in stage.info.origins:
                    return stage
            raise CheckpointMismatchError(f"Blend: {ref} is of none of the sources {', '.join(self._stages)}")
        return self._of_tag(tag_of(next(sample_indices(as_ref(ref)))))

    def _of_tag(self, tag: int) -> Stage:
        if tag not in self._stage_of:
            raise CheckpointMismatchError(
                f"Blend of {', '.join(self._stages)}: a ref has tag {tag}, which is that of none of them: was a source "
                "removed or renamed since?"
            )
        return self._stage_of[tag]


def _common(encoders: list[TaskEncoder | None]) -> TaskEncoder | None:
    """The encoder that all sources share; an `_AmbiguousEncoder` if they have several."""
    if all(encoder is encoders[0] for encoder in encoders):
        return encoders[0]
    return _AmbiguousEncoder([encoder for encoder in encoders if encoder is not None])


class _AmbiguousEncoder(TaskEncoder):
    """Stands for the encoders of several branches: its methods raise ValueError, since a stage cannot choose one."""

    def __init__(self, encoders: list[TaskEncoder]) -> None:
        self.global_rng = tuple(sorted({kind for encoder in encoders for kind in kinds(encoder.global_rng)}))

    def length(self, item: Any) -> int:
        raise self._unclear("length")

    def images(self, item: Any) -> int:
        raise self._unclear("images")

    def cut(self, item: Any, start: int, stop: int) -> Any:
        raise self._unclear("cut")

    def pack(self, items: list[Any], rng: Rng) -> Any:
        raise self._unclear("pack")

    def batch(self, items: list[Any], rng: Rng) -> Any:
        raise self._unclear("batch")

    def _unclear(self, method: str) -> ValueError:
        return ValueError(
            f"the branches of the Blend upstream have encoders of their own, and it is not clear whose {method} to "
            "use: give the stage encoder="
        )


def check_sources(sources: Mapping[str, Stage]) -> None:
    """Raise ValueError unless these are stages of one lane, properly named, that all give samples or all items."""
    if not sources:
        raise ValueError("Blend needs at least one source")
    for name, stage in sources.items():
        if not isinstance(name, str) or not name or set("/#") & set(name):
            raise ValueError(f"Blend: a source's name is a word without / and #, not {name!r}")
        if not isinstance(stage, Stage):
            raise ValueError(f"Blend: the source {name!r} must be a stage, not {type(stage).__name__}")
    if any(stage.lane is not next(iter(sources.values())).lane for stage in sources.values()):
        raise ValueError("Blend: all sources must be built for the same lane")
    if len({isinstance(stage, SampleStage) for stage in sources.values()}) > 1:
        raise ValueError("Blend: some sources give samples and others items; end all before or all after Encode")

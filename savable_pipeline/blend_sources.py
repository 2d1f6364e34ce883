"""`Merged`: several stages as the source of one, which knows by a ref which of them it is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.encoder import TaskEncoder
from savable_pipeline.errors import CheckpointMismatchError
from savable_pipeline.global_rng import kinds
from savable_pipeline.lane import Lane
from savable_pipeline.rng import Rng
from savable_pipeline.sample import TAG_SHIFT, Ref, RefArray, Sample, tag_of
from savable_pipeline.stage import ItemRef, Stage, sample_indices


class Merged(Stage):
    """Base of `Blend`: the sources, by name, and the way from a ref to its source. A subclass says what comes when."""

    def __init__(self, sources: Mapping[str, Stage]) -> None:
        _check(sources)
        self._stages = dict(sorted(sources.items()))  # a source's turn does not depend on where it was written
        self._name_sources("")
        self._encoder = self._common_encoder()

    def _name_sources(self, branch: str) -> None:
        for name, stage in self._stages.items():
            stage.name_branch(f"{branch}/{name}" if branch else name)
        self._stage_of = {tag: stage for stage in self._stages.values() for tag in stage.tags}
        if len(self._stage_of) < sum(len(stage.tags) for stage in self._stages.values()):
            raise ValueError(f"Blend: two of {', '.join(self._stages)} have the same 15-bit tag; rename one")

    def name_branch(self, name: str) -> None:
        """Belong to a source of another `Blend`."""
        self.branch = name
        self._name_sources(name)

    def _common_encoder(self) -> TaskEncoder | None:
        encoders = [stage.encoder for stage in self._stages.values()]
        if all(encoder is encoders[0] for encoder in encoders):
            return encoders[0]
        if any(encoder is None for encoder in encoders):
            raise ValueError("Blend: some sources give samples and others items; end all before or all after Encode")
        return _Several([encoder for encoder in encoders if encoder is not None])

    def samples(self, refs: RefArray) -> list[Sample]:
        """The samples that these refs name, unread."""
        tags = _tags_of(refs)
        found: list[Any] = [None] * len(refs)
        for tag in np.unique(tags).tolist():
            mine = np.flatnonzero(tags == tag)
            for place, sample in zip(mine.tolist(), self._of_tag(tag).samples(refs[mine]), strict=True):
                found[place] = sample
        return found

    def announce(self, refs: RefArray) -> None:
        """Let each source fetch ahead what is its own."""
        tags = _tags_of(refs)
        for tag in np.unique(tags).tolist():
            self._of_tag(tag).announce(refs[tags == tag])

    def fetch(self, ref: ItemRef | Ref) -> Any:
        """Make the thing that a ref names again."""
        if isinstance(ref, Ref):
            for stage in self._stages.values():
                if stage.reads(ref.source):
                    return stage.fetch(ref)
            raise CheckpointMismatchError(f"Blend: {ref} is of none of the sources {', '.join(self._stages)}")
        return self._of_tag(tag_of(next(sample_indices(ref)))).fetch(ref)

    def _of_tag(self, tag: int) -> Stage:
        if tag not in self._stage_of:
            raise CheckpointMismatchError(
                f"Blend of {', '.join(self._stages)}: a ref has tag {tag}, which is that of none of them: was a source "
                "removed or renamed since?"
            )
        return self._stage_of[tag]

    @property
    def sources(self) -> tuple[Stage, ...]:
        """The sources, by name."""
        return tuple(self._stages.values())

    @property
    def lane(self) -> Lane:
        """The lane of all the sources."""
        return self.sources[0].lane

    @property
    def depth(self) -> int:
        """One more than the deepest source."""
        return 1 + max(stage.depth for stage in self.sources)

    @property
    def population(self) -> int:
        """How many samples all the sources have."""
        return sum(stage.population for stage in self.sources)

    @property
    def encoder(self) -> TaskEncoder | None:
        """The encoder of all sources; one that only says so if they have several."""
        return self._encoder


def _tags_of(refs: RefArray) -> NDArray[np.int64]:
    return (refs["index"] >> np.uint64(TAG_SHIFT)).astype(np.int64)


class _Several(TaskEncoder):
    """Stands for the encoders of several branches, of which a later stage cannot know whose to use."""

    def __init__(self, encoders: list[TaskEncoder]) -> None:
        self.global_rng = tuple(sorted({kind for encoder in encoders for kind in kinds(encoder.global_rng)}))

    def length(self, item: Any) -> int:
        """Raises ValueError."""
        raise self._unclear("length")

    def images(self, item: Any) -> int:
        """Raises ValueError."""
        raise self._unclear("images")

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """Raises ValueError."""
        raise self._unclear("cut")

    def pack(self, items: list[Any], rng: Rng) -> Any:
        """Raises ValueError."""
        raise self._unclear("pack")

    def batch(self, items: list[Any], rng: Rng) -> Any:
        """Raises ValueError."""
        raise self._unclear("batch")

    def _unclear(self, method: str) -> ValueError:
        return ValueError(
            f"the branches of the Blend upstream have encoders of their own, and it is not clear whose {method} to "
            "use: give the stage encoder="
        )


def _check(sources: Mapping[str, Stage]) -> None:
    if not sources:
        raise ValueError("Blend needs at least one source")
    for name, stage in sources.items():
        if not isinstance(name, str) or not name or set("/#") & set(name):
            raise ValueError(f"Blend: a source's name is a word without / and #, not {name!r}")
        if not isinstance(stage, Stage):
            raise ValueError(f"Blend: the source {name!r} must be a stage, not {type(stage).__name__}")
    lanes = [stage.lane for stage in sources.values()]
    if any(lane is not lanes[0] for lane in lanes):
        raise ValueError("Blend: all sources must be built for the same lane")

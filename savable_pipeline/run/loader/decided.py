"""`Decisions` of `SavableLoader.reconfigure`: build, agree on and restore them.

    reconfigure(weights=, exclude=, max_length=) ──▶ Decisions, only numbers ──▶ the run's facts, saved in the state
                                                                             ──▶ stages of each lane, when it is built

After a change of settings, `applicable_decisions` returns those that still apply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from savable_pipeline.core.run_facts import NUMBER, Decisions
from savable_pipeline.core.weights import Weight, integer_weights
from savable_pipeline.core.wording import listed
from savable_pipeline.data.dataset.key_index import sample_indices_of
from savable_pipeline.run.loader.local_lanes import LocalLanes
from savable_pipeline.run.loader.ranks import Ranks
from savable_pipeline.run.state.fingerprint import stage_field
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.packing.packer import OnlinePacker
from savable_pipeline.stages.pipeline import upstream
from savable_pipeline.stages.readers.reader import RecordReader
from savable_pipeline.stages.stage import Stage

log = logging.getLogger(__name__)

_MOST_WEIGHT_SUM = 1 << 30  # largest sum of a Blend's weights after they are converted to integers

Excluded: TypeAlias = str | tuple[str, str]  # a key, or a source and a key


def reconfigure(
    before: Decisions,
    slot: int,
    last: Stage,
    weights: Mapping[str, Weight] | None = None,
    exclude: Iterable[Excluded] | None = None,
    max_length: int | None = None,
) -> Decisions:
    """Return the decisions of `before`, changed by the arguments.

    `slot` is the first slot that the change affects, as `epoch << 40 | slot`. `last` is the last stage of a lane.
    Raises ValueError for impossible decisions, such as weights that are negative or all 0.
    """
    if weights is None and exclude is None and max_length is None:
        raise ValueError("reconfigure: pass weights=, exclude= or max_length=")
    by_blend = {} if weights is None else _group_by_blend(weights, _blends(last))
    new_weights = {
        branch: _bounded_weights(integer_weights(dict(sorted(by_blend[branch].items())))) for branch in sorted(by_blend)
    }
    indices = {} if exclude is None else _excluded_indices(exclude, last)
    new_excluded = {tag: _packed({*before.numbers(tag), *indices[tag]}) for tag in sorted(indices)}
    max_length = 0 if max_length is None else _checked_max_length(max_length, _packers(last))
    encoded = msgspec.msgpack.encode((before.digest, slot, new_weights, new_excluded, max_length))
    return Decisions(
        slot,
        xxh3_64_intdigest(encoded) >> 2 or 1,
        dict(sorted({**before.weights, **new_weights}.items())),
        dict(sorted({**before.excluded, **new_excluded}.items())),
        max_length or before.max_length,
    )


def _packed(numbers: Iterable[int]) -> bytes:
    return np.array(sorted(numbers), NUMBER).tobytes()


def _bounded_weights(weights: Mapping[str, int]) -> dict[str, int]:
    """Scale weights to a sum of at most about 2^30. A weight above 0 stays at least 1."""
    total = sum(weights.values())
    if total <= _MOST_WEIGHT_SUM:
        return dict(weights)
    return {name: max(1, weight * _MOST_WEIGHT_SUM // total) if weight else 0 for name, weight in weights.items()}


def _blends(last: Stage) -> dict[str, Blend]:
    """Return the Blends of a pipeline by their branch."""
    return {stage.info.branch: stage for stage in upstream(last) if isinstance(stage, Blend)}


def _packers(last: Stage) -> list[OnlinePacker]:
    return [stage for stage in upstream(last) if isinstance(stage, OnlinePacker)]


def _group_by_blend(weights: Mapping[str, Weight], blends: Mapping[str, Blend]) -> dict[str, dict[str, Weight]]:
    """Group weights by the branch of their Blend: "text/web" is the source "web" of the Blend "text"."""
    if not blends:
        raise ValueError("reconfigure: weights= needs a Blend in the pipeline")
    if not isinstance(weights, Mapping) or not weights:
        raise ValueError(f"reconfigure: weights must be a dict by the sources of a Blend, not {weights!r}")
    # by full name: the branch of the Blend (`at`), and the name of the source in it
    sources = {f"{at}/{name}" if at else name: (at, name) for at, blend in blends.items() for name in blend.names}
    known = ", ".join(sorted(sources))
    if unknown := [name for name in weights if name not in sources]:
        raise ValueError(f"reconfigure: no source is called {unknown[0]!r}. The sources are {known}.")
    found: dict[str, dict[str, Weight]] = {}
    for full_name, weight in weights.items():
        branch, name = sources[full_name]
        found.setdefault(branch, {})[name] = weight
    required = sorted(full_name for full_name, (branch, _) in sources.items() if branch in found)
    if missing := [full_name for full_name in required if full_name not in weights]:
        raise ValueError(f"reconfigure: every source needs a weight, but {', '.join(missing)} has none")
    return found


def _excluded_indices(exclude: Iterable[Excluded], last: Stage) -> dict[int, list[int]]:
    """Return the indices of the samples with these keys, by the tag of their source, and warn about unknown keys."""
    if isinstance(exclude, str):
        raise ValueError(f"reconfigure: exclude must be a list: [{exclude!r}]")
    readers = {stage.branch: stage for stage in upstream(last) if isinstance(stage, RecordReader)}
    found: dict[int, list[int]] = {}
    unknown: set[str] = set()
    for sources, keys in _group_by_source(exclude, list(readers)).items():
        missing = set(keys)
        for source in sources:
            reader = readers[source]
            numbers, absent = sample_indices_of(reader.dataset, keys)
            found.setdefault(reader.tag, []).extend(numbers)
            missing &= absent
        unknown |= missing
    if unknown:
        log.warning("reconfigure(exclude=) has %d keys without a sample: %s", len(unknown), listed(sorted(unknown)))
    return {tag: numbers for tag, numbers in found.items() if numbers}


def _group_by_source(exclude: Iterable[Excluded], names: list[str]) -> dict[tuple[str, ...], list[str]]:
    """Return the keys by the sources that may have them: all `names`, or the source in a pair."""
    found: dict[tuple[str, ...], list[str]] = {}
    for each in exclude:
        pair = (None, each) if isinstance(each, str) else each
        source, key = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if not isinstance(key, str):
            raise ValueError(f"reconfigure: exclude must have keys or (source, key) pairs, not {each!r}")
        if source is not None and source not in names:
            raise ValueError(
                f"reconfigure: no source is called {source!r}. The sources are {', '.join(map(repr, names))}."
            )
        found.setdefault(tuple(names) if source is None else (source,), []).append(key)
    return found


def _checked_max_length(max_length: int, packers: list[OnlinePacker]) -> int:
    """Return `max_length`. Raises ValueError unless there is exactly one packer, and it can use this length."""
    if len(packers) != 1:
        found = ", ".join(stage_field(packer, "max_length") for packer in packers)
        raise ValueError(
            f"reconfigure: max_length needs exactly one OnlinePacker. This pipeline has {found or 'none'}."
        )
    if type(max_length) is not int or not 1 <= max_length <= packers[0].max_length:
        raise ValueError(f"reconfigure: max_length must be 1 to {packers[0].max_length}, not {max_length!r}")
    if callable(packers[0].policy):
        raise ValueError("reconfigure: max_length does not apply to a policy function")
    return max_length


def agreed_decisions(ranks: Ranks, make: Callable[[], Decisions]) -> Decisions:
    """Return the result of `make`.

    If the ranks can communicate, check that all have the same result. Raises the errors of `make`, and ValueError if
    the results of two ranks differ.
    """
    if not ranks.has_group:
        return make()
    try:
        result: Decisions | Exception = (decisions := make())
        text, digest = str(decisions), decisions.digest
    except Exception as error:
        result = error
        text, digest = f"{type(error).__name__}: {error}", 0
    gathered = ranks.gather((text, digest))
    if isinstance(result, Exception):
        raise result
    for rank, (other_text, other_digest) in enumerate(gathered):
        if (other_text, other_digest) != (text, digest):
            raise ValueError(
                f"reconfigure: rank {ranks.rank} {text}, but rank {rank} {other_text}. Pass the same arguments on "
                "each rank, at the same step."
            )
    return result


def applicable_decisions(decisions: Decisions, last: Stage, differing: Iterable[str]) -> Decisions:
    """Return the saved decisions that apply although `differing` settings changed.

    A changed setting replaces the decision about it, with a warning.
    """
    changed = set(differing)
    blends, packers = _blends(last), _packers(last)
    weights = {
        branch: weights
        for branch, weights in decisions.weights.items()
        if branch in blends
        and blends[branch].names == sorted(weights)
        and not changed & {stage_field(blends[branch], name) for name in ("weights", "schedule", "sources")}
    }
    length, packer = decisions.max_length, packers[0] if len(packers) == 1 else None
    if packer is None or length > packer.max_length or stage_field(packer, "max_length") in changed:
        length = 0
    in_effect = replace(decisions, weights=weights, max_length=length)
    if in_effect != decisions:
        log.warning("changed settings replace an earlier reconfigure. Still in effect: %s", in_effect)
    return in_effect


def check_decided(local: LocalLanes, decisions: Decisions) -> Decisions:
    """Return these decisions.

    Raises ValueError if the pipeline cannot be built with them, or if they would make an endless run finite or the
    reverse. Only sources with a weight above 0 decide whether a Blend is endless.
    """
    is_endless = local.last_stage.info.endless
    if local.built_with(decisions).info.endless != is_endless:
        raise ValueError(
            f"reconfigure: these weights would make the run {'finite' if is_endless else 'endless'}. Keep a "
            "weight above 0 for a source of the same kind."
        )
    return decisions

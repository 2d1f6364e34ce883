"""`Join`: stage that adds parts of other datasets to each sample by key.

Nothing is copied.

    reader ── refs ──▶ Join ── refs ──▶ …          a state has only the reader's state
                        │ key → index of keys → index of a sample in the other dataset
                        ▼
                   "captions.txt"

A `Join` has no state of its own and draws no random numbers. It can therefore be added to a saved run, which then
continues in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from savable_pipeline.data.dataset.opening import Samples, open_dataset
from savable_pipeline.data.dataset.ref import REF, RefArray, skip_counters
from savable_pipeline.data.dataset.sample import JoinedParts, Sample
from savable_pipeline.data.shards.paths import Shards
from savable_pipeline.errors import SavableError, ShardError
from savable_pipeline.stages.advice import check_choice
from savable_pipeline.stages.chunked_stage import ChunkedStage, chunked
from savable_pipeline.stages.stage import SampleStage, State
from savable_pipeline.stages.stage_info import StageInfo
from savable_pipeline.stages.stage_settings import MEDIA_RULES, SettingRule

Missing: TypeAlias = Literal["skip", "empty"]
JoinedSamples: TypeAlias = dict[str, Sample | None]  # one sample's matches, by name of the store


def check_join(stores: Mapping[str, Any], on: str, missing: str) -> None:
    """Raise ValueError for a wrong setting of a `Join`."""
    check_choice("Join", "on", on, ("key",))
    check_choice("Join", "missing", missing, get_args(Missing))
    if not stores:
        raise ValueError("Join: stores is empty. Name at least one dataset to join.")
    for name in stores:
        if not isinstance(name, str) or not name or set("./#") & set(name):
            raise ValueError(f"Join: the name of a store must be a non-empty str without . / and #, not {name!r}")


class Join(ChunkedStage, SampleStage):
    """Samples with the parts of other datasets.

    `sample["captions.txt"]` is the `txt` of the sample of `captions` with the same key.

    The keys of a store are indexed once, by one process, and saved beside its shards. With and without a `Join`,
    samples have the same order, refs and random numbers. `allow={"joins"}` loads a state of another `Join`. Samples in
    that state whose key is missing now are skipped when they are encoded or rebuilt; without an encoder, their batches
    have them without joined parts.

    Args:
        source: A stage of samples.
        stores: Datasets by a name of your choice, which becomes the prefix of their parts. A dataset is anything that a
            reader or `sp.open_dataset` takes, or the result of `sp.open_dataset`.
        on: "key": by the keys of both samples; a table's keys are in the column of `sp.open_dataset(path, key=COLUMN)`.
        missing: For a sample whose key a store lacks: "skip" leaves it out, "empty" adds no parts; both are counted.

    Raises:
        ValueError: A setting is wrong.
        ShardError: Two samples of a store have the same key, or a great many samples in a row have no match.

    Example:
        >>> samples = sp.TarShardReader("shards/", sp.Lane(), shuffle=False)
        >>> samples = custom.Join(samples, {"other": "shards/1.tar"}, missing="skip")
        >>> sample = next(samples)
        >>> sample.key, list(sample), sample["other.txt"]
        ('s000100', ['json', 'txt', 'png', 'other.json', 'other.txt', 'other.png'], b'picture 100')
        >>> samples.counts["skipped/no such key in other"]
        100
    """

    source: SampleStage
    setting_rules: ClassVar[Mapping[str, SettingRule]] = {
        "joins": SettingRule(field="joins", whole_stage=True),
        **{name: replace(rule, field=f"joined_{name}") for name, rule in MEDIA_RULES.items()},
    }

    def __init__(
        self,
        source: SampleStage,
        stores: Mapping[str, Shards | Samples],
        *,
        on: Literal["key"] = "key",
        missing: Missing = "skip",
    ) -> None:
        super().__init__(source)
        check_join(stores, on, missing)
        self.missing, self.one_to_one = missing, missing == "empty"
        self._stores = {name: self._open_store(name, stores[name]) for name in sorted(stores)}
        self.datasets = tuple(store.dataset for store in self._stores.values())
        # the refs that were taken last, as bytes, and their samples, which the next stage usually opens
        self._last_taken: tuple[bytes, list[Sample]] = (b"", [])
        self._unmatched = 0  # number of consecutive samples that were dropped

    def _open_store(self, name: str, store: Shards | Samples) -> Samples:
        """Open a store once for all lanes of a process. Raises `ShardError` if two samples have the same key."""
        pins = self.lane.worker.pinned
        if not isinstance(store, Samples):
            paths = store if isinstance(store, str | os.PathLike) else tuple(os.fspath(path) for path in store)
            return self.lane.shared(("join", paths), lambda: _check_keys(name, open_dataset(paths).pinned(pins)))
        if not store.is_whole:
            raise ValueError(f"Join: {name!r} is a slice or has a transform. Pass sp.open_dataset(path) without them.")
        return self.lane.shared(("join", id(store)), lambda: _check_keys(name, store.pinned(pins)))

    def describe(self) -> StageInfo:
        """Return the facts of the source.

        Depth is not increased, so that later stages draw the same random numbers as without a join.
        """
        info = self.source.info
        return replace(info, raises=info.raises and self.missing == "empty")

    def take(self, n: int) -> RefArray:
        """Return the refs of the next 1 to `n` samples: REF (any,).

        There are none at the end, or if `n` is 0.
        """
        while True:
            refs: RefArray = chunked(self.source).take(n)
            if self.missing == "empty" or not len(refs):
                return refs
            samples = self._joined(self.source.open_samples(refs))
            matched = [self._has_matches(sample) for sample in samples]
            if any(matched):
                found_refs: RefArray = refs if all(matched) else refs[np.array(matched)]
                self._last_taken = found_refs.tobytes(), list(compress(samples, matched))
                return found_refs

    def _has_matches(self, sample: Sample) -> bool:
        """Return whether all stores have the sample, otherwise count it. Raises `ShardError` for very many in a row."""
        lacking = _stores_without(sample)
        if not lacking:
            self._unmatched = 0
            return True
        self.counts.update(skip_counters(f"no such key in {lacking[0]}", sample.index))
        self._unmatched += 1
        if self._unmatched >= self.info.max_empty:
            raise ShardError(
                f"Join: {lacking[0]!r} lacks {self._unmatched:,} samples in a row, the last one with key {sample.key!r}"
                ". Name the column of keys by sp.open_dataset(path, key=COLUMN), or pass missing='empty'.",
                reason="no such key",
            )
        return False

    def open_samples(self, refs: RefArray) -> list[Sample]:
        """Return the samples with these refs, with the joined parts.

        Parts are read on access.
        """
        last_refs, last_samples = self._last_taken
        samples = list(last_samples) if refs.tobytes() == last_refs else self._joined(self.source.open_samples(refs))
        for sample in samples if self.missing == "empty" else ():
            for name in _stores_without(sample):
                self.counts[f"without {name}"] += 1
        return samples

    def fetch(self, ref: Any) -> Sample:
        """Return the sample with this ref, with the joined parts."""
        return self._joined([self.source.fetch(ref)])[0]

    def _joined(self, samples: list[Sample]) -> list[Sample]:
        """Return the samples with joined parts. If a key cannot be read, reading the parts raises the error."""
        keys, errors = [], {}  # `errors` by position of the sample
        for position, sample in enumerate(samples):
            try:
                keys.append(sample.key)
            except SavableError as error:  # a damaged shard; `on_error` of the stage that reads parts decides
                errors[position] = error
                keys.append("")
        matches: list[JoinedSamples] = [{} for _ in samples]
        for name, store in self._stores.items():
            for position, match in enumerate(_samples_of(store, keys, request=not self.lane.skips)):
                matches[position][name] = match
        skips_missing = self.missing == "skip"
        return [
            sample.read_from(JoinedParts(sample.origin, matches[position], errors.get(position), skips_missing))
            for position, sample in enumerate(samples)
        ]

    def prefetch(self, refs: RefArray) -> None:
        """Start to download the samples with these refs.

        Samples of the joined stores are not downloaded, because keys are not known yet.
        """
        self.source.prefetch(refs)

    def save_state(self) -> State:
        """Return the source's state, so that states with and without a join are equal."""
        return self.source.save_state()

    def restore_state(self, state: State) -> None:
        """Return to the position in `state`."""
        self._last_taken, self._unmatched = (b"", []), 0
        self.source.restore_state(state)

    def settings(self) -> dict[str, Any]:
        """Return the settings of the joined stores.

        `joins` has for each store the policy for missing samples, and a hash of its shards. `media` has for each store
        the hash of its table of media, as in the settings of readers.
        """
        hashes = {name: store.dataset.digest().hex() for name, store in self._stores.items()}
        media: dict[str, dict[str, str]] = {}
        for name, store in self._stores.items():
            for setting, values in store.dataset.known_media.settings().items():
                media.setdefault(setting, {})[name] = values
        return {"joins": {name: f"{self.missing} {digest}" for name, digest in hashes.items()}, **media}


def _stores_without(sample: Sample) -> list[str]:
    """Return the names of the stores that lack a sample's key; none if the key cannot be read."""
    joined = sample.origin
    assert isinstance(joined, JoinedParts)
    return [] if joined.fault is not None else [name for name, other in joined.others.items() if other is None]


def _samples_of(store: Samples, keys: list[str], *, request: bool) -> list[Sample | None]:
    """Return for each key the sample of the store that has it, or None.

    With `request`, the download of their parts starts.
    """
    indices = store.keys.find(keys)  # negative for a key that the store lacks
    refs = np.zeros(int((indices >= 0).sum()), REF)
    refs["index"] = indices[indices >= 0]
    opened = iter(store.dataset.open_samples(refs, request=request))
    return [next(opened) if index >= 0 else None for index in indices.tolist()]


def _check_keys(name: str, store: Samples) -> Samples:
    """Return the store. Raises `ShardError` if two of its samples have the same key."""
    if store.keys.duplicate is not None:
        first, second = store.dataset.open_samples(np.array([(index, 0) for index in store.keys.duplicate], REF))
        raise ShardError(
            f"Join: {name!r} has two samples with key {first.key!r}. Remove one."
            f"\n  {store.dataset.address}: {first.shard} and {second.shard}",
            reason="two samples with one key",
        )
    return store

"""`read_webdataset`: a webdataset pipeline for `sp.read(dataset)`.

    SimpleShardList ─ splitters ─ shuffle ─ tar files │ shuffle     │ decode ─ map ─ to_tuple │ shuffle │ batched ─ map
    read(urls, shuffle=…)                             │ .shuffle(n) │ .encode(…)              │ .shuffle│ .batch(n)

The stages of a webdataset pipeline are objects that can be inspected. Stages that handle one sample at a time run
unchanged, so that their results are webdataset's. Stages that hold samples are replaced by stages with a state.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample
from savable_pipeline.stages.batch_difference import copied_leaves, difference_of_leaves, has_a_value
from savable_pipeline.stages.blending.blend import Blend
from savable_pipeline.stages.mapped_function import mapped_name
from savable_pipeline.stages.pipeline_value import ItemPipeline, Pipeline, PipelineStep, SamplePipeline
from savable_pipeline.stages.task_encoder import Skip, TaskEncoder

ReadShards = Callable[..., SamplePipeline]

_logger = logging.getLogger(__name__)
# Names of functions or classes of webdataset's stages, by what replaces them. The values of this dict are whether the
# list of shards is endless.
_SHARD_LISTS = {"SimpleShardList": False, "ResampledShards": True, "ResampledShardList": True}
_SPLITTERS = {"split_by_node", "split_by_worker", "single_node_only", "non_empty", "check_empty", "Cached"}
_OPENERS = {"tarfile_samples", "cached_tarfile_samples", "StreamingOpen", "FileCache", "url_opener"}
_OPENERS |= {"tar_file_expander", "group_by_keys"}
_PER_SAMPLE = {"_map", "_decode", "_rename", "_map_dict", "_map_tuple", "_to_tuple", "_select", "_associate"}
_PER_SAMPLE |= {"_extract_keys", "_rename_keys", "_xdecode", "_rsample", "_log_keys", "_transform_with"}
_ONE_TO_ONE = {"_decode", "_rename", "_map_dict", "_map_tuple", "_to_tuple", "_associate", "_extract_keys", "_xdecode"}
_FAN_OUTS = {"_unlisted", "_unbatched"}
_STOPPING_HANDLERS = {"ignore_and_stop", "warn_and_stop"}  # names of webdataset's handlers
# Advice by the name of an unsupported stage.
_ADVICE = {
    "DirectoryShardList": "Give sp.read the folder.",
    "MultiShardSample": "Write sp.blend of one sp.read for each dataset.",
    "LMDBCached": "Remove it: samples are read where they are.",
    "islice": "Remove it, and pass subset= to sp.read.",
    "_info": "Remove it: `savable preview` shows samples.",
    "ShardListDataset": "Write sp.read([shard['url'] for shard in dataset.shards]).map(function).",
}
_FALLBACK = (  # advice for the user's own stages
    "If it handles one sample at a time, pass per_sample=[it]. "
    "If it stands for a stage of webdataset, pass replace={it: stage}."
)
_PICKLED = {"pyd", "pickle", "pkl", "pth"}  # suffixes of parts that webdataset unpickles
_LONGEST_LIST = 32  # a longer list is described by its length
_CHECKED_SAMPLES = 8  # number of samples with which stages of `per_sample` are checked


def read_webdataset(
    dataset: Any, read: ReadShards, options: Mapping[str, Any], *, per_sample: Sequence[Any], replace: Mapping[Any, Any]
) -> Pipeline:
    """Return a pipeline with the same samples and results as a webdataset pipeline.

    Args:
        dataset: A `webdataset.WebDataset`, `DataPipeline`, `WebLoader`, `RandomMix` or `RoundRobin`.
        read: `sp.read`.
        options: Options of `read`, which replace those of the dataset.
        per_sample: Stages of the user that handle one sample at a time.
        replace: Stages of the user, or their classes or functions, and for each a webdataset stage that acts like it.

    Raises:
        ValueError: A stage cannot be exact.
    """
    chain = _Chain(per_sample, replace)
    chain.add_dataset(dataset)
    return chain.pipeline(read, options)


@dataclass
class _Chain:
    """The stages of a webdataset pipeline, grouped by what replaces them."""

    per_sample: Sequence[Any]
    replace: Mapping[Any, Any]
    urls: Any = None
    reading: dict[str, Any] = field(default_factory=lambda: {"shuffle": False, "epochs": 1})  # options of `sp.read`
    suffixes: set[str] | None = None
    select_files: Callable[[str], bool] | None = None
    opened: bool = False  # whether shards are opened by the stages so far, so that samples follow
    buffers: list[int] = field(default_factory=list)  # sizes of shuffle buffers of samples
    stages: list[Any] = field(default_factory=list)  # stages that handle one sample at a time
    checked: bool = False  # whether one of these `stages` is in `per_sample`, so that results are checked
    makes_several: bool = False  # whether one of these `stages` may make several items of a sample
    item_buffers: list[int] = field(default_factory=list)  # sizes of shuffle buffers of items
    batch: tuple[int, Any, bool] | None = None  # size, collation, and whether the last batch may be smaller
    batch_stages: list[Any] = field(default_factory=list)  # stages after batching
    branches: list[_Chain] = field(default_factory=list)  # datasets of a mix
    mix: dict[str, Any] = field(default_factory=dict)  # options of `Blend`

    def add_dataset(self, dataset: Any) -> None:
        """Add all stages of a dataset, including those of nested datasets."""
        name = type(dataset).__name__
        if name in ("RandomMix", "RoundRobin"):
            self._add_mix(dataset)
            return
        if not hasattr(dataset, "pipeline"):
            self.add(dataset)
            return
        for stage in dataset.pipeline:
            if hasattr(stage, "batch_size") and hasattr(stage, "dataset"):  # torch's DataLoader in a WebLoader
                self.add_dataset(stage.dataset)
                if stage.batch_size is not None:
                    self._add_batched(stage.batch_size, stage.collate_fn, not stage.drop_last)
                else:  # without batching, `collate_fn` is called for each sample: `default_convert` by default
                    self._add_per_sample(partial(_map_each, stage.collate_fn), makes_several=False)
            elif hasattr(stage, "pipeline") or type(stage).__name__ in ("RandomMix", "RoundRobin"):
                self.add_dataset(stage)
            else:
                self.add(stage)
        if dataset.repetitions == sys.maxsize:
            self._repeat(None)
            if dataset.nsamples > 0:
                _logger.warning(
                    "with_epoch(%d) counts samples of one worker, so this pipeline repeats without end. "
                    "Pass epoch_slots= to SavableLoader: the number of batches of an epoch, of all ranks.",
                    dataset.nsamples,
                )
        elif dataset.repetitions != 1:
            if dataset.nsamples > 0:
                raise ValueError(
                    f"repeat(nbatches={dataset.nsamples}) would end in the middle of the data. Remove nbatches=, and "
                    "pass subset= or epochs= to sp.read."
                )
            self._repeat(dataset.repetitions)

    def _repeat(self, times: int | None) -> None:
        """Multiply the epochs by `times`; None: endless."""
        for chain in self.readers():
            epochs = chain.reading["epochs"]
            chain.reading["epochs"] = None if times is None or epochs is None else times * epochs

    def readers(self) -> list[_Chain]:
        """Return the chains that read shards: those of the branches, or this one."""
        return [reader for branch in self.branches for reader in branch.readers()] or [self]

    def _add_mix(self, mix: Any) -> None:
        """Add the datasets of a `RandomMix` or `RoundRobin` as branches."""
        for dataset in mix.datasets:
            self.branches.append(_Chain(self.per_sample, self.replace))
            self.branches[-1].add_dataset(dataset)
            if self.branches[-1].batch is not None:
                raise ValueError(f"{type(mix).__name__} mixes batches. Put batched() after it instead.")
        probabilities = getattr(mix, "probs", None) or [1] * len(self.branches)
        weights = {str(number): weight for number, weight in enumerate(probabilities)}
        self.mix = {"weights": weights, "until": "all" if mix.longest else "first"}
        self.opened = True

    def add(self, stage: Any) -> None:
        """Add one stage. Raises ValueError if it cannot be exact."""
        original, function = stage, getattr(stage, "f", stage)
        for known in (stage, function, type(stage)):
            if isinstance(known, Hashable) and known in self.replace:
                stage = self.replace[known]
        name = _name(stage)
        if name in _SHARD_LISTS and not self.opened:
            if getattr(original, "weights", None) is not None:
                raise ValueError(
                    f"{_shown(original)} has weights of shards. Write sp.blend of one sp.read for each weight."
                )
            self.urls = original.urls
            resampled = _SHARD_LISTS[name]
            shuffled = resampled or getattr(original, "seed", None) is not None
            self.reading.update({"epochs": None} if resampled else {}, shuffle=self.reading["shuffle"] or shuffled)
        elif name in _SPLITTERS:
            return
        elif name in ("_shuffle", "detshuffle"):
            self._add_shuffle(_shuffle_size(stage if hasattr(stage, "args") or hasattr(stage, "bufsize") else original))
        elif name in _OPENERS:
            self._add_opener(original if hasattr(original, "kw") else stage)
        elif name == "_batched":
            settings = _settings(stage)
            self._add_batched(settings["batchsize"], settings["collation_fn"], settings["partial"])
        elif name in _PER_SAMPLE | _FAN_OUTS and _is_of_webdataset(stage):
            self._add_per_sample(stage, makes_several=name in _FAN_OUTS)
        elif any(stage is each or function is each for each in self.per_sample):
            self.checked = True
            self._add_per_sample(stage, makes_several=True)
        else:
            raise ValueError(f"sp.read cannot resume the stage {_shown(stage)} exactly. {_ADVICE.get(name, _FALLBACK)}")

    def _add_shuffle(self, size: int) -> None:
        """Add a shuffle buffer, or shuffle shards if they are not opened yet."""
        if not self.opened:
            self.reading["shuffle"] |= size > 0
        elif self.batch is not None:
            raise ValueError(
                "shuffle() after batched() is not supported. Shuffle before batched(), or add unbatched()."
            )
        elif size > 0:
            (self.item_buffers if self.makes_several or self.branches else self.buffers).append(size)

    def _add_opener(self, stage: Any) -> None:
        """Add a stage that opens shards, with its choice of files and its handler of errors."""
        self.opened = True
        settings = _settings(stage)
        if _handler(settings) is not None:
            self.reading["on_error"] = "skip"
        for name in ("rename_files", "keys"):
            if settings.get(name) is not None and getattr(settings[name], "__name__", "") != "base_plus_ext":
                raise ValueError(
                    f"sp.read does not support {name}= of webdataset. Rename parts with .rename() instead."
                )
        self.suffixes = settings.get("suffixes", self.suffixes)
        self.select_files = settings.get("select_files", self.select_files)

    def _add_batched(self, size: int, collation: Any, partial_batches: bool) -> None:
        """Set size and collation of batches."""
        if self.batch is not None:
            raise ValueError("sp.read supports one batched() in a pipeline. Add unbatched() before the second one.")
        self.batch = (size, collation, partial_batches)

    def _add_per_sample(self, stage: Any, *, makes_several: bool) -> None:
        """Add a stage that handles one sample at a time, or one batch if it is after batching."""
        if self.batch is not None and _name(stage) in _FAN_OUTS:
            # the stage divides batches into samples, so that batches of one sample each have the same result
            _, collation, _ = self.batch
            user_stages = [each for each in self.batch_stages if not isinstance(each, partial)]
            if user_stages or (collation is not None and getattr(collation, "__name__", "") != "default_collation_fn"):
                raise ValueError(
                    f"{_shown(stage)}() after batches with your own collation or stage is not supported. Remove both."
                )
            for each in (partial(_batches_of_one, collation), *self.batch_stages, stage):
                self._add_stage(each)
            self.batch, self.batch_stages = None, []
        elif self.batch is not None:
            self.batch_stages.append(stage)
        else:
            self.makes_several |= makes_several
            self._add_stage(stage)

    def _add_stage(self, stage: Any) -> None:
        """Add a stage to all chains that read shards."""
        for chain in self.readers():
            chain.stages.append(stage)
            chain.checked |= self.checked

    def pipeline(self, read: ReadShards, options: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline of the stages that were added."""
        chooses_parts = self.suffixes is not None or self.select_files is not None
        encode = bool(self.stages or self.batch or self.item_buffers or chooses_parts)
        items = self.items(read, options, encode=encode)
        if self.batch is None:
            return items
        size, _, partial_batches = self.batch
        assert isinstance(items, ItemPipeline)
        return items.batch(size, drop_last=not partial_batches, encoder=WebDatasetEncoder(self))

    def items(self, read: ReadShards, options: Mapping[str, Any], *, encode: bool) -> SamplePipeline | ItemPipeline:
        """Return the pipeline without batching, with the encoder of `stages` if `encode`."""
        items: Any
        if self.branches:
            steps = {str(n): each.items(read, options, encode=True).step for n, each in enumerate(self.branches)}
            items = ItemPipeline(PipelineStep.of(Blend, steps, **self.mix))
        else:
            if self.urls is None:
                raise ValueError("this webdataset pipeline has no shard list. Start it with SimpleShardList(urls).")
            items = read(self.urls, **{**self.reading, **options})
            for size in self.buffers:
                items = items.shuffle(size)
            if encode:
                items = items.encode(WebDatasetEncoder(self))
        for size in self.item_buffers:
            items = items.shuffle(size)
        return items  # type: ignore[no-any-return]


class WebDatasetEncoder(TaskEncoder):
    """Encoder that runs the per-sample stages of a webdataset pipeline.

    Args:
        chain: The stages of the pipeline.
    """

    def __init__(self, chain: _Chain) -> None:
        self._skipped: list[BaseException] = []  # errors of the current sample that handlers skipped
        self._stages = [_with_handler(stage, self._skipped) for stage in chain.stages]
        self._batch_stages = [_with_handler(stage, self._skipped) for stage in chain.batch_stages]
        urls = [chain.urls] if isinstance(chain.urls, str) else list(chain.urls or ())
        self._urls = {url.rsplit("/", 1)[-1]: url for url in urls}
        self._needs_name, self._suffixes_by_part = _uses_name(chain.stages), dict[str, str]()
        self._suffixes, self._select, self._batch = chain.suffixes, chain.select_files, chain.batch
        self._makes_several = chain.checked or any(_name(stage) in _FAN_OUTS for stage in chain.stages)
        self.one_to_one = all(_is_one_to_one(stage) for stage in chain.stages)
        self._decodes = any(_name(stage) in ("_decode", "_xdecode") or _is_decoder(stage) for stage in chain.stages)
        # the samples that were checked, with the keys of their random numbers; None if no more are checked
        self._checked: list[tuple[dict[str, Any], int]] | None = [] if chain.checked else None
        self.global_rng = True if chain.checked else None  # `_check` seeds global generators

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """Return the item of a sample, a `Skip`, or an iterator of items."""
        fields = self._fields(sample)
        if self._checked is not None:
            self._check(fields, rng)
        self._skipped.clear()
        results = _run(self._stages, [fields])
        if self._makes_several:
            return iter(results)
        items = list(results)
        if len(items) == 1:
            return items[0]
        if items:
            raise ValueError(
                f"the stages made {len(items)} items of one sample. Use unlisted() or unbatched() for that."
            )
        return Skip(type(self._skipped[0]).__name__ if self._skipped else "filtered")

    def batch(self, items: list[Any], rng: Rng) -> Any:
        """Build the batch by webdataset's collation and the stages after `batched`."""
        if self._batch is None:
            return super().batch(items, rng)
        _, collation, _ = self._batch
        batches = list(_run(self._batch_stages, [items if collation is None else collation(items)]))
        if len(batches) != 1:
            raise ValueError("a stage after batched() left out a batch, or made several. Put it before batched().")
        return batches[0]

    def settings(self) -> dict[str, Any]:
        """Return the names of the stages, and their plain arguments."""
        stages = [_describe(stage) for stage in self._stages]
        collations = [] if self._batch is None else [self._batch[1]]
        batch = [_describe(stage) for stage in (*collations, *self._batch_stages)]
        return {"stages": stages, "batch": batch, "suffixes": sorted(self._suffixes) if self._suffixes else None}

    def _fields(self, sample: Sample) -> dict[str, Any]:
        """Return a sample as webdataset's dict, with the parts that the pipeline reads."""
        fields: dict[str, Any] = {}
        if self._needs_name:
            shard = sample.shard
            fields = {"__key__": sample.key, "__url__": self._urls.get(shard.rsplit("/", 1)[-1], shard)}
        suffixes = self._suffixes_by_part
        for name in sample:
            if (suffix := suffixes.get(name)) is None:
                suffix = suffixes[name] = self._checked_suffix(name)
            if not suffix or (self._select is not None and not self._select(f"{sample.key}.{name}")):
                continue
            if suffix in fields:
                raise ValueError(f"two files of the sample have the suffix {suffix!r}. Rename one of them.")
            fields[suffix] = sample[name]
        return fields

    def _checked_suffix(self, name: str) -> str:
        """Return the name of a part in webdataset's samples, or "" for a part that is not read."""
        suffix = name.lower()
        if self._suffixes is not None and suffix not in self._suffixes:
            return ""
        if self._decodes and suffix.removesuffix(".gz").rsplit(".", 1)[-1] in _PICKLED:
            raise ValueError(
                f"decode() would unpickle the part {name!r}, which can run code. Drop it with select_files=, "
                "or rewrite it as JSON or .npy."
            )
        return suffix

    def _check(self, fields: dict[str, Any], rng: Rng) -> None:
        """Raise ValueError if the stages' results for several samples together differ from those for each one alone."""
        assert self._checked is not None
        seed = seeder(True)
        assert seed is not None
        self._checked.append((fields, rng.key))

        def seeded(several: Iterable[tuple[dict[str, Any], int]]) -> Iterator[dict[str, Any]]:
            """Yield copies of samples, each after seeding the generators with its key."""
            for each, key in several:
                seed(key)
                yield copy(each)

        alone = [item for each in self._checked for item in _run(self._stages, seeded([each]))]
        together = list(_run(self._stages, seeded(self._checked)))
        difference = difference_of_leaves(copied_leaves(alone, "items"), copied_leaves(together, "items"), has_a_value)
        if difference is not None:
            raise ValueError(
                f"a stage in per_sample= depends on other samples: {difference}. Remove it from per_sample=."
            )
        seed(rng.key)
        if len(self._checked) == _CHECKED_SAMPLES:
            self._checked = None


def _run(stages: Iterable[Any], samples: Iterable[Any]) -> Iterable[Any]:
    """Pass samples through stages, and return an iterable of the results."""
    results: Any = iter(samples)
    for stage in stages:
        results = stage.run(results) if hasattr(stage, "run") else stage(results)
    return results  # type: ignore[no-any-return]


def _batches_of_one(collation: Any, samples: Iterable[Any]) -> Iterator[Any]:
    """Yield a batch of each sample, as a stage of webdataset does."""
    for sample in samples:
        yield [sample] if collation is None else collation([sample])


def _map_each(function: Callable[[Any], Any], samples: Iterable[Any]) -> Iterator[Any]:
    """Yield the result of a function for each sample, as a stage of webdataset does."""
    for sample in samples:
        yield function(sample)


def _name(stage: Any) -> str:
    """Return the name of the function that a stage calls, or of its class."""
    kind = getattr(stage, "f", stage)
    return str(getattr(kind, "__name__", type(kind).__name__))


def _shown(stage: Any) -> str:
    """Return the name of a stage as the user wrote it, such as `info` for webdataset's `_info`."""
    return _name(stage).lstrip("_")


def _is_of_webdataset(stage: Any) -> bool:
    """Return whether a stage is webdataset's, not the user's."""
    return str(getattr(getattr(stage, "f", None), "__module__", "")).split(".")[0] == "webdataset"


def _shuffle_size(stage: Any) -> int:
    return int(stage.bufsize if hasattr(stage, "bufsize") else _settings(stage)["bufsize"])


def _settings(stage: Any) -> dict[str, Any]:
    """Return the arguments of a stage by name."""
    if not hasattr(stage, "kw"):
        return {"handler": stage.handler} if hasattr(stage, "handler") else {}
    bound = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    bound.apply_defaults()
    return dict(bound.arguments)


def _handler(settings: Mapping[str, Any]) -> Any:
    """Return the handler that continues after an error, or None if errors are raised.

    Raises ValueError for a handler that ends the run.
    """
    handler = settings.get("handler")
    name = getattr(handler, "__name__", "")
    if name in _STOPPING_HANDLERS:
        raise ValueError(f"handler={name} would end the run at an error. Use warn_and_continue or reraise_exception.")
    return None if handler is None or name == "reraise_exception" else handler


def _with_handler(stage: Any, skipped: list[BaseException]) -> Any:
    """Return a stage whose handler, if it has one, also adds skipped errors to `skipped`."""
    if (handler := _handler(_settings(stage))) is None:
        return stage
    bound = inspect.signature(stage.f).bind(None, *stage.args, **stage.kw)
    bound.arguments["handler"] = partial(_handle, handler, skipped)
    changed = copy(stage)
    changed.args, changed.kw = bound.args[1:], bound.kwargs
    return changed


def _handle(handler: Callable[[BaseException], bool], skipped: list[BaseException], error: BaseException) -> bool:
    """Add an error to `skipped` if `handler` skips it, and raise it otherwise."""
    if not handler(error):
        raise error
    skipped.append(error)
    return True


def _is_one_to_one(stage: Any) -> bool:
    """Return whether a stage makes exactly one item of each sample, or raises.

    A `partial` is a stage that `_Chain` added for the collation of single samples.
    """
    is_known = _name(stage) in _ONE_TO_ONE or _is_decoder(stage)
    return isinstance(stage, partial) or (is_known and _handler(_settings(stage)) is None)


def _uses_name(stages: Sequence[Any]) -> bool:
    """Return whether stages may use a sample's key or shard. A key takes as long to read as a small part."""
    for stage in stages:
        name = _name(stage)
        if name == "_to_tuple" or (name == "_rename" and not stage.kw.get("keep", True)):
            return "__" in _describe(stage)
        if name not in ("_decode", "_map_dict") and not _is_decoder(stage):
            return True
    return True


def _is_decoder(stage: Any) -> bool:
    """Return whether a stage calls a `Decoder` of webdataset."""
    return any(type(value).__name__ == "Decoder" for value in getattr(stage, "args", ()))


def _describe(value: Any, depth: int = 5) -> str:
    """Describe a stage or an argument for settings: names of functions, plain values, and fields of objects."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        is_listed = depth and len(value) <= _LONGEST_LIST
        parts = [_describe(each, depth - 1) for each in value] if is_listed else [str(len(value))]
        return f"[{', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)}]"
    if hasattr(value, "f") and hasattr(value, "kw"):
        named = [f"{name}={_describe(each, depth - 1)}" for name, each in sorted(value.kw.items()) if name != "handler"]
        return f"{_shown(value)}({', '.join([_describe(each, depth - 1) for each in value.args] + named)})"
    if isinstance(value, partial) or hasattr(value, "__qualname__"):
        return mapped_name(value)
    fields = sorted(vars(value).items()) if depth and hasattr(value, "__dict__") else []
    return f"{type(value).__name__}({', '.join(f'{name}={_describe(each, depth - 1)}' for name, each in fields)})"

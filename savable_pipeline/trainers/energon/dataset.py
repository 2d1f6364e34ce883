"""`get_train_dataset`, `get_val_dataset` and more, as in Megatron-Energon.

`begin_at_share` resumes a run of Energon at the same fraction of an epoch. Energon's state has positions in its
workers' parts of the data, buffers and generators, and none of these exist in our runs. Only the number of used samples
carries over. The two orders differ. So of an epoch of N samples, of which a fraction s was used, about N·s·(1 - s) are
repeated in it, and as many are skipped. Later epochs are complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypedDict, Unpack

from megatron.energon import DefaultTaskEncoder, SampleDecoder, log_exception

from savable_pipeline.core.lane import Lane
from savable_pipeline.trainers.energon.encoder import FromEnergon
from savable_pipeline.trainers.energon.sources import Sources
from savable_pipeline.trainers.energon.stages import EnergonPipeline

log = logging.getLogger(__name__)


class DatasetSettings(TypedDict, total=False):
    """Arguments that all functions of this module share.

    Those after `video_decode_audio` are ours.
    """

    sample_type: type | None
    dataset_config: str | None
    split_config: str | None
    parallel_shard_iters: int | None
    handler: Callable[..., Any] | None
    auto_decode: bool
    image_decode: str
    av_decode: str
    video_decode_audio: bool
    seed: int | None
    lanes: int | None
    trust: bool
    skip_samples: int


_FILE_ARGUMENTS = ("sample_type", "dataset_config", "split_config")
_DECODER_ARGUMENTS = ("image_decode", "av_decode", "video_decode_audio")
_LANES = 96
_UNUSED_ARGUMENTS = ("parallel_shard_iters", "handler")


@dataclass(frozen=True)
class EnergonDataset:
    """Result of `get_train_dataset` and similar, for `get_savable_loader`.

    Args:
        pipeline: Builds the stages of a lane, also for an `sp.SavableLoader` of your own.
        worker_config: Energon's worker configuration.
        seed: The seed of the run.
        lanes: The number of lanes. None (default): 96, or for a single epoch the number of ranks.
        length: Batches of each rank in a (virtual) epoch. None (default): as many as there are, or endless.
        restarts: Whether each iterator starts at the first batch.
    """

    pipeline: EnergonPipeline
    worker_config: Any
    seed: int
    lanes: int | None = None
    length: int | None = None
    restarts: bool = False

    def __len__(self) -> int:
        """Return the number of batches of each rank in a (virtual) epoch, as Energon counts them.

        Skipped samples count too.
        """
        if self.length is None:
            return self._counted_batches
        return min(self.length, self._counted_batches) if self.restarts and self.is_finite else self.length

    @property
    def is_finite(self) -> bool:
        """Return whether the run is a single epoch."""
        return not self.pipeline.encoder.sources.repeat

    @property
    def run_lanes(self) -> int:
        """The number of lanes.

        Raises ValueError if the ranks do not divide them.
        """
        world_size = self.worker_config.world_size
        lanes = self.lanes or (world_size if self.is_finite else _LANES)
        if lanes % world_size:
            rounded = -(-lanes // world_size) * world_size
            raise ValueError(
                f"{world_size} ranks do not divide {lanes} lanes. Set lanes={rounded}, a multiple of each number of "
                "ranks that the run may have."
            )
        return lanes

    @cached_property
    def _counted_batches(self) -> int:
        return self.pipeline.epoch_batches(self.run_lanes, self.seed, self.worker_config.world_size)

    def with_sources(self, **changes: Any) -> EnergonDataset:
        """Return this dataset with other settings of its sources."""
        encoder = self.pipeline.encoder.with_sources(replace(self.pipeline.encoder.sources, **changes))
        return replace(self, pipeline=replace(self.pipeline, encoder=encoder))

    def config(self) -> dict[str, Any]:
        """Return the settings that define the data and its order, to compare or log them.

        Energon's datasets have this method too.
        """
        pipeline, sources = self.pipeline, self.pipeline.encoder.sources
        return {
            "type": type(self).__qualname__,
            "seed": self.seed,
            "lanes": self.run_lanes,
            "length": self.length,
            "batch_size": pipeline.batch_size,
            "drop_last": pipeline.drop_last,
            "packing_buffer_size": pipeline.packing_buffer_size,
            "shuffle_buffer_size": pipeline.shuffle_buffer_size,
            "max_samples_per_sequence": sources.block_size,
            "skip_samples": pipeline.skip_samples,
            "repeat": sources.repeat,
            "shuffle": sources.shuffle,
            "encoder": pipeline.encoder.settings(),
            "worker_config": self.worker_config.config(),
            "datasets": {name: leaf.factory.config() for name, leaf in sources.leaves.items()},
        }


def get_train_dataset(
    path: str | os.PathLike[str],
    *,
    split_part: str = "train",
    worker_config: Any,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    shuffle_buffer_size: int | None,
    max_samples_per_sequence: int | None,
    virtual_epoch_length: int = 0,
    shuffle_over_epochs_multiplier: int | None = 1,
    task_encoder: Any = None,
    repeat: bool = True,
    **settings: Unpack[DatasetSettings],
) -> EnergonDataset:
    """Return the data to train on, as Energon's function of this name.

    Args:
        path: A prepared dataset, a prepared file of JSON lines, or a metadataset.
        split_part: The split to read.
        worker_config: Rank, world size, workers and group. `seed_offset` is the seed, unless `seed=` is passed.
        batch_size: Samples or packs of a batch. None: no batches, or those of `batch_group_criterion`.
        batch_drop_last: Whether to drop a last batch that is smaller (default False).
        packing_buffer_size: Samples among which `select_samples_to_pack` chooses, in each lane. None (default): no
            packing.
        shuffle_buffer_size: Samples of the shuffle buffer, in each lane. None: no buffer.
        max_samples_per_sequence: Samples that stay together when the order is shuffled. None: 8.
        virtual_epoch_length: Batches of each rank in an epoch. 0 (default): endless.
        shuffle_over_epochs_multiplier: None: no shuffling. All numbers are treated as 1 (default): each sample occurs
            once per epoch.
        task_encoder: Energon's `TaskEncoder`. None (default): Energon's default one.
        repeat: Whether the run is endless (default). Otherwise it is one epoch.
        **settings: Energon's `sample_type`, `dataset_config`, `split_config` (files of `.nv-meta`), `auto_decode`,
            `image_decode`, `av_decode`, `video_decode_audio`; `parallel_shard_iters` and `handler` are not used. Ours:
            `seed`; `lanes`, the logical workers, fixed for the run and a multiple of each number of ranks that it may
            have; `trust`, to run code that the dataset names and unpickle its parts; `skip_samples`, the number of
            samples of all lanes to skip at the start.

    Raises:
        TypeError: The settings cannot be resumed exactly. The message says what to do.
        ValueError: A setting is wrong.

    Example:
        ```python
        from savable_pipeline.energon import WorkerConfig, get_savable_loader, get_train_dataset

        data = get_train_dataset(
            "dataset", worker_config=WorkerConfig.default_worker_config(2), batch_size=4,
            shuffle_buffer_size=100, max_samples_per_sequence=100, task_encoder=TheirEncoder(),
        )
        loader = get_savable_loader(data)
        ```
    """
    encoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    sources = replace(
        _sources(path, split_part, encoder, settings, training=True),
        repeat=repeat,
        shuffle=shuffle_over_epochs_multiplier is not None,
        block_size=max_samples_per_sequence,
    )
    if shuffle_over_epochs_multiplier not in (None, 1):
        log.info("shuffle_over_epochs_multiplier=%s is as 1: each sample once an epoch", shuffle_over_epochs_multiplier)
    pipeline = _pipeline(
        encoder, sources, worker_config, batch_size, batch_drop_last, packing_buffer_size, shuffle_buffer_size
    )
    pipeline = replace(pipeline, skip_samples=settings.get("skip_samples", 0))
    return _dataset(pipeline, worker_config, settings, virtual_epoch_length)


def get_val_dataset(
    path: str | os.PathLike[str],
    *,
    split_part: str = "val",
    worker_config: Any,
    batch_size: int | None,
    batch_drop_last: bool = False,
    packing_buffer_size: int | None = None,
    limit: int | None = None,
    task_encoder: Any = None,
    **settings: Unpack[DatasetSettings],
) -> EnergonDataset:
    """Return the data to evaluate on, as Energon's function of this name.

    It is one epoch without shuffling. It ends before the first round, one batch from each lane, that some lane cannot
    fill. A single rank has one lane unless `lanes` is passed, and yields all samples. With N ranks, up to N - 1 batches
    are skipped, and counted.

    Args:
        path: As for `get_train_dataset`.
        split_part: The split to read.
        worker_config: As for `get_train_dataset`.
        batch_size: As for `get_train_dataset`.
        batch_drop_last: As for `get_train_dataset`.
        packing_buffer_size: As for `get_train_dataset`.
        limit: The most batches of each rank. None (default): no limit.
        task_encoder: Energon's `TaskEncoder`.
        **settings: As for `get_train_dataset`.

    Raises:
        TypeError: As for `get_train_dataset`.
        ValueError: As for `get_train_dataset`.
    """
    encoder = DefaultTaskEncoder() if task_encoder is None else task_encoder
    sources = replace(_sources(path, split_part, encoder, settings, training=False), repeat=False, shuffle=False)
    pipeline = _pipeline(encoder, sources, worker_config, batch_size, batch_drop_last, packing_buffer_size)
    # each evaluation starts at the first batch
    return replace(_dataset(pipeline, worker_config, settings, limit), restarts=True)


def get_val_datasets(path: str | os.PathLike[str], **arguments: Any) -> list[tuple[EnergonDataset, Any]]:
    """Return each dataset of a path to evaluate on by itself.

    Each is paired with the dataset of Energon that it is built from.

    Args:
        path: As for `get_val_dataset`.
        **arguments: As for `get_val_dataset`.

    Raises:
        TypeError: As for `get_val_dataset`.
        ValueError: As for `get_val_dataset`.
    """
    whole = get_val_dataset(path, **arguments)
    leaves = whole.pipeline.encoder.sources.leaves
    return [(whole.with_sources(only=name), leaf.factory) for name, leaf in leaves.items()]


def RepeatDataset(dataset: EnergonDataset, *, worker_config: Any = None) -> EnergonDataset:
    """Return an endless dataset.

    Args:
        dataset: The dataset to repeat.
        worker_config: Ignored. The dataset has its own.
    """
    config = checked(dataset).worker_config
    lanes = dataset.lanes or config.world_size * max(1, config.num_workers)
    return replace(dataset.with_sources(repeat=True), lanes=lanes)


def LimitDataset(
    dataset: EnergonDataset, length: int, *, worker_config: Any = None, reset_after_epoch: bool = False
) -> EnergonDataset:
    """Return a dataset whose epoch has at most `length` batches.

    Args:
        dataset: The dataset to limit.
        length: Batches of each rank.
        worker_config: Ignored. The dataset has its own.
        reset_after_epoch: Whether each iterator starts at the first batch (default False).
    """
    return replace(checked(dataset), length=length, restarts=reset_after_epoch)


def checked(dataset: Any) -> EnergonDataset:
    """Return a dataset of ours, or raise TypeError for one of Energon."""
    if isinstance(dataset, EnergonDataset):
        return dataset
    raise TypeError(
        f"{type(dataset).__module__}.{type(dataset).__name__} is no dataset of savable_pipeline.energon. Use its "
        "get_train_dataset or get_val_dataset."
    )


def _sources(
    path: str | os.PathLike[str], split_part: str, encoder: Any, settings: DatasetSettings, *, training: bool
) -> Sources:
    """Check the settings, and return the sources of a dataset."""
    known = DatasetSettings.__annotations__
    for name in settings:
        if name not in known:
            raise TypeError(f"unknown argument {name!r}. Besides Energon's chosen_files, use {', '.join(known)}.")
        if name in _UNUSED_ARGUMENTS:
            log.info("%s is ignored: this loader does not need it", name)
    chosen_files = {name: settings[name] for name in _FILE_ARGUMENTS if settings.get(name) is not None}  # type: ignore[literal-required]
    arguments: dict[str, Any] = {"split_part": split_part, "training": training, **chosen_files}
    return Sources(path, arguments, _decoder(encoder, settings), settings.get("trust", False))


def _decoder(encoder: Any, settings: DatasetSettings) -> Any:
    """Return the decoder: the encoder's, or one built from arguments that Energon deprecates."""
    if not settings.get("auto_decode", True):
        return None
    passed = {name: settings[name] for name in _DECODER_ARGUMENTS if name in settings}  # type: ignore[literal-required]
    if not passed:
        return encoder.decoder
    decoder, own_decoder = SampleDecoder(**passed), encoder.decoder
    if own_decoder not in (None, DefaultTaskEncoder.decoder) and own_decoder.config() != decoder.config():
        raise ValueError(f"task_encoder has a decoder, and so has {', '.join(passed)}. Remove one.")
    return decoder


def _pipeline(
    encoder: Any,
    sources: Sources,
    worker_config: Any,
    batch_size: int | None,
    drop_last: bool,
    packing_buffer_size: int | None,
    shuffle_buffer_size: int | None = None,
) -> EnergonPipeline:
    """Build the pipeline of a dataset."""
    packing = packing_buffer_size is not None
    handler = worker_config.global_error_handler
    wrapped = FromEnergon(
        encoder,
        sources,
        packing=packing,
        batching=batch_size is not None,
        error_handler=None if handler is log_exception else handler,
    )
    return EnergonPipeline(wrapped, batch_size, drop_last, packing_buffer_size, shuffle_buffer_size)


def _dataset(
    pipeline: EnergonPipeline, worker_config: Any, settings: DatasetSettings, length: int | None
) -> EnergonDataset:
    """Build the dataset, with the seed of the worker configuration as default.

    A `length` of 0 is no limit, as in Energon.
    """
    seed = settings.get("seed")
    seed = worker_config.seed_offset if seed is None else seed
    return EnergonDataset(pipeline, worker_config, seed, settings.get("lanes"), length or None)


# keys in Energon's states: the samples drawn by a reader, and those in a buffer
_DRAWN_KEY, _BUFFERED_KEY = "_sample_count", "_restore_keys"


class AtShare(NamedTuple):
    """Dataset that starts within an epoch.

    Attributes:
        dataset: The dataset for the loader. A resume of its run needs the same `skip_samples`.
        skip_samples: The number of samples of all ranks that are skipped.
        again: About how many samples of the epoch are repeated, and also about how many are skipped.
    """

    dataset: EnergonDataset
    skip_samples: int
    again: int


def begin_at_share(dataset: EnergonDataset, states: Sequence[Any]) -> AtShare:
    """Return a dataset that starts about where a run of Energon stopped.

    Args:
        dataset: A result of `get_train_dataset` that no loader has used.
        states: The results of Energon's `save_state_rank`, one per rank.

    Raises:
        ValueError: These are not states of Energon.

    Example:
        ```python
        import torch

        from savable_pipeline.energon import begin_at_share, get_savable_loader

        states = [torch.load(f"rank{rank}.pt", weights_only=False) for rank in range(8)]
        begun = begin_at_share(dataset, states)
        loader = get_savable_loader(begun.dataset)
        print(begun.skip_samples, begun.again)
        ```
    """
    if not states or not all(hasattr(state, "worker_states") for state in states):
        raise ValueError("states must be the results of save_state_rank of Energon, one of each rank")
    used = sum(_used_samples(state) for state in states)
    population = dataset.pipeline.encoder.samples(Lane()).info.population
    if len(dataset.pipeline.encoder.sources.leaves) == 1:
        used %= population  # whole epochs need not be skipped
    fraction = used % population / population
    again = round(population * fraction * (1 - fraction))
    log.warning(
        "the run starts after %d samples (%.1f %% of an epoch). About %d of its %d samples are repeated, and as "
        "many skipped. Resume it with skip_samples=%d.",
        used,
        100 * fraction,
        again,
        population,
        used,
    )
    return AtShare(replace(dataset, pipeline=replace(dataset.pipeline, skip_samples=used)), used, again)


def _used_samples(state: Any) -> int:
    """Return the number of samples that a rank has used.

    They are the samples that were drawn and are not in a buffer, and those of the batches since the workers' states
    were saved.
    """
    drawn = sum(_numbers_under(state.worker_states, _DRAWN_KEY)) - sum(
        _numbers_under(state.worker_states, _BUFFERED_KEY)
    )
    batches_since = sum(getattr(worker, "offset", None) or 0 for worker in state.worker_states)
    return max(0, drawn) + batches_since * (state.micro_batch_size or 1)


def _numbers_under(node: Any, key: str) -> Iterator[int]:
    """Yield each number under a key anywhere in a state, and for a list under it the length."""
    if is_dataclass(node):
        node = {each.name: getattr(node, each.name) for each in fields(node)}
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == key:
                yield len(value) if isinstance(value, list | tuple) else int(value)
            else:
                yield from _numbers_under(value, key)
    elif isinstance(node, list | tuple):
        for each in node:
            yield from _numbers_under(each, key)

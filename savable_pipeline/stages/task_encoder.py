"""`TaskEncoder`: base class of encoders of samples, items, packs and batches."""

from __future__ import annotations

from typing import Any, NoReturn

from savable_pipeline.core.batch_memory import collate
from savable_pipeline.core.rng import Rng
from savable_pipeline.data.dataset.sample import Sample


class Skip:
    """Result of `TaskEncoder.encode` that drops and counts the sample.

    Args:
        reason: The name under which the sample is counted.

    Example:
        >>> class Large(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return sample.json()["id"] if sample.json()["id"] >= 5 else sp.Skip("small")
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), Large())
        >>> next(items), items.counts["skipped/small"]
        (5, 5)
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"Skip({self.reason!r})"


class TaskEncoder:
    """Encoder of samples into items, packs and batches.

    Derive your own and write `encode`.

    Each method must be pure: its result depends only on its arguments, the encoder's settings and random numbers drawn
    during the call. Draw these from `rng`, which is keyed by the run's seed and the sample, pack or batch. Python's
    `random`, `numpy.random` and `torch` are seeded for the calls of a method that draws from them, so that existing
    transforms resume exactly: see `global_rng`. An error of a method becomes an `EncodeError` that names the stage and
    the data.

    Example:
        >>> class Crops(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         left, top = rng.integers(5), rng.integers(5)
        ...         pixels = np.asarray(sample.image())[top : top + 4, left : left + 4]
        ...         return {"pixels": torch.tensor(pixels), "id": sample.json()["id"]}
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(seed=7), shuffle=False), Crops())
        >>> batch = next(sp.Batcher(items, size=2))
        >>> batch["pixels"].shape, batch["id"]
        (torch.Size([2, 4, 4, 3]), tensor([0, 1]))
    """

    global_rng: bool | tuple[str, ...] | None = None
    """The global generators to seed for each call: all (True), none (False), or some of "python", "numpy", "torch".

    None: all of them, as soon as a call is found to draw from one.
    """

    thread_safe: bool = False
    """Whether several threads may call the methods at the same time. The threads then share one encoder."""

    one_to_one: bool = False
    """Whether `encode` returns exactly one item for every sample, and `pack` never returns a `Skip`.

    A finite loader without packing then knows its length, and `loader.skip` does not encode.
    """

    length_column: str | None = None
    """The column of the Parquet or Arrow files that has the `length` of each sample's item, such as "n_tokens".

    To choose packs, only this column is read, and `length_of` is not called. None: `length_of` returns the length.
    """

    def encode(self, sample: Sample, rng: Rng) -> Any:
        """Encode a sample as an item.

        Args:
            sample: The sample. Its parts are read on access.
            rng: Random numbers of this call.

        Returns:
            One item, which is any value except None; or `Skip(reason)`; or an iterator of items (an object with
            `__next__`; a list is one item). If `encode` raises, `Encode(on_error=)` decides whether to skip the sample.
            An iterator may have a method `pass_over(parts)`, which a resume in the middle of a sample calls. It skips
            `parts` items without building them, and returns the number of skipped items. The random numbers of the next
            item are the same as if the skipped items were built.

        Example:
            >>> class Captions(sp.TaskEncoder):
            ...     def encode(self, sample, rng):
            ...         return sample.text().encode()
            >>> type(Captions().encode(next(sp.TarShardReader("shards/", sp.Lane())), sp.Rng(0)))
            <class 'bytes'>
        """
        raise NotImplementedError(f"{type(self).__name__} has no encode(sample, rng). Write one.")

    def length(self, item: Any) -> int:
        """Return the length of an item in tokens, by default `len(item)`.

        `OnlinePacker`, `BucketBatcher` and a `Blend` by tokens call it.

        Args:
            item: A result of `encode`.

        Example:
            >>> sp.TaskEncoder().length([5, 3, 8])
            3
        """
        return len(item)

    def images(self, item: Any) -> int:
        """Return the number of images of an item, by default 0.

        `OnlinePacker` and `Balance` call it.

        Args:
            item: A result of `encode`.

        Example:
            >>> sp.TaskEncoder().images([5, 3, 8])
            0
        """
        return 0

    def length_of(self, sample: Sample) -> int | None:
        """Return, without encoding, the `length` of a sample's item.

        The default is None.

        Define it if the length is cheap to find, such as from the size of a text or the header of an image.
        `OnlinePacker` then chooses packs by this length, and encodes each sample once, when its pack is yielded. An
        `EncodeError` is raised if the item has another length. `sample.media()` returns the duration of audio and
        video, and the size of images, without decoding; after `savable index --media` also without reading.

        Args:
            sample: The sample that would be encoded.

        Returns:
            The length in tokens; None if it is unknown, or if `encode` skips the sample or returns several items.

        Example:
            >>> class Texts(sp.TaskEncoder):
            ...     def encode(self, sample, rng):
            ...         return list(sample["txt"])
            ...     def length_of(self, sample):
            ...         return len(sample["txt"])
            >>> sample = next(sp.TarShardReader("shards/", sp.Lane()))
            >>> Texts().length_of(sample) == Texts().length(Texts().encode(sample, sp.Rng(0)))
            True
            >>> class Patches(sp.TaskEncoder):
            ...     def length_of(self, sample):
            ...         info = sample.media("png")
            ...         return (info.width // 4) * (info.height // 4)
            >>> Patches().length_of(sample)
            4
        """
        return None

    def images_of(self, sample: Sample) -> int:
        """Return, without encoding, the `images` of a sample's item.

        Define it together with `length_of` if `images` is not always 0.

        Args:
            sample: The sample that would be encoded.

        Example:
            >>> class Pictures(sp.TaskEncoder):
            ...     def images_of(self, sample):
            ...         return sum(part in sample for part in ("png", "2.png"))
            >>> Pictures().images_of(next(sp.TarShardReader("shards/", sp.Lane())))
            1
        """
        return 0

    def cut(self, item: Any, start: int, stop: int) -> Any:
        """Cut an item, by default by a slice.

        `OnlinePacker` calls it to truncate or split items.

        Args:
            item: A result of `encode`.
            start: The first token of the part.
            stop: The token after the last token of the part.

        Returns:
            An item of length `stop - start`.

        Example:
            >>> sp.TaskEncoder().cut([5, 3, 8], 1, 3)
            [3, 8]
        """
        return item[start:stop]

    def pack(self, items: list[Any], rng: Rng) -> Any:
        """Build a pack of several items, for `OnlinePacker`. There is no default.

        Args:
            items: The items, in order.
            rng: Random numbers of this call.

        Returns:
            The pack, or `Skip(reason)`.

        Example:
            >>> class Tokens(sp.TaskEncoder):
            ...     def pack(self, items, rng):
            ...         return [token for item in items for token in item]
            >>> Tokens().pack([[5, 3], [8]], sp.Rng(0))
            [5, 3, 8]
        """
        raise NotImplementedError(f"{type(self).__name__} has no pack(items, rng). Write one, or remove the packer.")

    def batch(self, items: list[Any], rng: Rng) -> Any:
        """Build a batch, by default like torch's `default_collate`.

        The default stacks tensors of equal shape.

        Args:
            items: Items or packs, in order.
            rng: Random numbers of this call.

        Example:
            >>> sp.TaskEncoder().batch([{"id": 3}, {"id": 8}], sp.Rng(0))  # int64 (2,)
            {'id': tensor([3, 8])}
        """
        return collate(items)

    def settings(self) -> dict[str, Any]:
        """Return every setting that changes items, packs or batches.

        Their values are plain. A saved state is only loaded with equal settings.

        Example:
            >>> sp.TaskEncoder().settings()
            {}
        """
        return {}


def overrides(encoder: TaskEncoder, method: str) -> bool:
    """Return whether an encoder has its own version of a method of `TaskEncoder`."""
    return getattr(getattr(encoder, method), "__func__", None) is not getattr(TaskEncoder, method)


def encoder_settings(encoder: TaskEncoder) -> dict[str, Any]:
    """Return an encoder's class and settings, to be added to a stage's settings.

    The encoder's settings get the prefix "encoder.".
    """
    length_column = {} if encoder.length_column is None else {"length_column": encoder.length_column}
    settings = {f"encoder.{name}": value for name, value in {**length_column, **encoder.settings()}.items()}
    return {"encoder": type(encoder).__qualname__, **settings}


class Decoded(TaskEncoder):
    """Encoder of a sample as the dict `sample.decoded()`.

    A batch is a dict of lists, with None for a missing part.

    This encoder draws no random numbers. To stack or crop, write your own encoder.

    Example:
        >>> items = sp.Encode(sp.TarShardReader("shards/", sp.Lane(), shuffle=False), sp.Decoded())
        >>> batch = next(sp.Batcher(items, size=2))
        >>> batch["__key__"], batch["txt"], batch["png"][0].shape
        (['s000000', 's000001'], ['picture 0', 'picture 1'], (8, 8, 3))
    """

    global_rng = False
    one_to_one = True

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any]:
        """Return the decoded parts by extension, and `__key__`."""
        return sample.decoded()

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, list[Any]]:
        """Return by extension the list of all values, with None for a missing part."""
        names = dict.fromkeys(name for item in items for name in item)
        return {name: [item.get(name) for item in items] for name in names}


def common_encoder(encoders: list[TaskEncoder | None]) -> TaskEncoder | None:
    """Return the encoder that all sources share, or None if no source has one.

    Returns an `_AmbiguousEncoder` if the sources have different encoders.
    """
    return encoders[0] if all(encoder is encoders[0] for encoder in encoders) else _AmbiguousEncoder()


class _AmbiguousEncoder(TaskEncoder):
    """Stands for several encoders of branches. Its methods raise ValueError, because a stage cannot choose one."""

    global_rng = False

    def _raise(self, *_: Any) -> NoReturn:
        """Raise ValueError. This replaces every method that stages after the `Blend` call."""
        raise ValueError("the sources of the Blend have several encoders. Choose one of them with encoder=.")

    length = images = cut = pack = batch = _raise  # type: ignore[assignment]

"""`Pipeline`: a pipeline as a value, which builds its stages for each lane.

    sp.read("shards/")   .shuffle(1000)   .encode(encoder)   .pack(max_length=8192)   .batch(4)
    └── SamplePipeline ──────────────┘    └── ItemPipeline ───────────────────────┘   └ BatchPipeline

A value opens nothing. Each method returns a new value with one more step. The class of a value says whether its
elements are samples, items or batches, as the classes of stages do, so that a type checker and the method call itself
reject steps in a wrong order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar, overload

from savable_pipeline.core.global_rng import KINDS, as_in_a_worker
from savable_pipeline.core.lane import Lane, WorkerContext
from savable_pipeline.core.on_error import OnError, check_on_error, shortened
from savable_pipeline.data.media.clips import Clips
from savable_pipeline.errors import SavableError
from savable_pipeline.stages.advice import check_count, closest
from savable_pipeline.stages.batcher import Batcher
from savable_pipeline.stages.blending.schedule import Schedule
from savable_pipeline.stages.bucket_batcher import BatchSize, BucketBatcher, BucketSizes, Group
from savable_pipeline.stages.chunked_stage import count_of
from savable_pipeline.stages.cost import Cost, check_cost
from savable_pipeline.stages.encode import Encode
from savable_pipeline.stages.encoder_calls import check_encoder, is_maker
from savable_pipeline.stages.filters import Filter
from savable_pipeline.stages.mapped_function import ClipEncoder, MappedFunction, check_mapped, mapped_name
from savable_pipeline.stages.packing.balance import Balance
from savable_pipeline.stages.packing.packer import OnlinePacker, check_packing
from savable_pipeline.stages.packing.packing_policies import PackingFunction, Policy
from savable_pipeline.stages.packing.piece_maker import TooLong
from savable_pipeline.stages.purity_check import check_share
from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
from savable_pipeline.stages.skipped_samples import check_limits
from savable_pipeline.stages.stage import BatchStage, ItemStage, SampleStage, Stage
from savable_pipeline.stages.stage_settings import check_function, short, tree
from savable_pipeline.stages.task_encoder import TaskEncoder

ALONE = ""  # name of the source of a step that has only one


@dataclass(frozen=True, slots=True)
class PipelineStep:
    """A step of a pipeline.

    It builds a stage by `make(source, *arguments, **options)`. `name` is for printing.

    If there are several `sources`, `make` gets a dict of stages by name. For the first step, the call is
    `make(lane, one_pass, *arguments, **options)`, where `one_pass` ends an otherwise endless source after one pass.
    """

    name: str
    make: Callable[..., Stage]
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, PipelineStep] = field(default_factory=dict)

    @classmethod
    def of(
        cls, stage: Callable[..., Stage], sources: Mapping[str, PipelineStep], *arguments: Any, **options: Any
    ) -> Self:
        """Return a step that builds its stage by calling `stage`.

        The step has only the options that differ from the defaults of `stage`.
        """
        return cls(stage.__name__, stage, arguments, unlike_defaults(stage, options), sources)

    def build(self, lane: Lane, *, one_pass: bool) -> Stage:
        """Build the stage for a lane, with all stages before it.

        Raises errors of the stages.
        """
        if not self.sources:
            return self.make(lane, one_pass, *self.arguments, **self.options)
        if isinstance(self.options.get("weights"), Schedule):
            one_pass = False  # a schedule is endless
        built = {name: source.build(lane, one_pass=one_pass) for name, source in self.sources.items()}
        return self.make(built.get(ALONE, built), *self.arguments, **self.options)

    def tree(self, label: str = ALONE) -> str:
        """Return the tree of the stages for printing.

        `label` is the name that the next step gives this one, if it has several sources.
        """
        arguments = [_argument_text(value) for value in self.arguments if value is not None]
        arguments += [f"{name}={_argument_text(value)}" for name, value in self.options.items()]
        title = f"{label}: {self.name}" if label else self.name
        return tree(f"{title}({', '.join(arguments)})", [source.tree(name) for name, source in self.sources.items()])


def unlike_defaults(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the default values of the function."""
    parameters = inspect.signature(function).parameters
    defaults = {name: parameters[name].default for name in options}
    return {
        name: value
        for name, value in options.items()
        if not (value is defaults[name] or (type(value) is type(defaults[name]) and value == defaults[name]))
    }


def _argument_text(value: Any) -> str:
    """Return the text of an argument for printing: of a function or an encoder its name."""
    if isinstance(value, MappedFunction):
        value = value.function
    if isinstance(value, TaskEncoder):
        return type(value).__name__
    return mapped_name(value) if callable(value) else short(value)


AnyPipeline = TypeVar("AnyPipeline", bound="Pipeline")
_BUILD_ADVICE = "Build the item in the function of .map, from sample.image(), sample.json() or sample.text()."
_METHOD_ADVICE = {  # advice by the name of a method that other libraries have
    "repeat": "Pass epochs= to sp.read; without it, a loader never ends.",
    "with_epoch": "Pass epoch_slots= to sp.SavableLoader.",
    "decode": _BUILD_ADVICE,
    "rename": _BUILD_ADVICE,
    "to_tuple": _BUILD_ADVICE,
    "collate": "Write batch(items, rng) of an sp.TaskEncoder.",
    "cache": "Pass cache= to sp.read.",
    "prefetch": "Pass workers=sp.Workers(prefetch=…) to sp.SavableLoader.",
    "split_by_node": "sp.SavableLoader distributes the samples over ranks.",
    "shard": "sp.SavableLoader distributes the samples over ranks.",
    "concatenate": "Use sp.blend({name: pipeline, …}).",
    "zip": "Use sp.join to combine parts of samples with equal keys.",
}


def _stage_options(method_locals: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stage's options from the `locals()` of the method that adds the stage, which takes the same options."""
    return {name: value for name, value in method_locals.items() if name != "self"}


@dataclass(frozen=True, slots=True, repr=False)
class Pipeline:
    """A chain of steps that a loader builds for each lane.

    An example is `sp.read("shards/").shuffle(1000).map(f).batch(4)`. It is immutable, and can be pickled: encoders by
    value, functions and classes by name. To inspect its elements, iterate over it, at any point of the chain: this is a
    single pass over the data without a loader. Train with `sp.SavableLoader(pipeline, seed=…)`. `print(pipeline)` shows
    the tree of its stages.

    For a pipeline that is not a chain, write a function of a lane that builds the stages: see the page "Your own
    stage". A function that builds the same stages as a chain yields equal batches and states.

    Args:
        step: The last step, which has the steps before it. `sp.read` and the methods build it.

    Example:
        >>> pipeline = sp.read("shards/", shuffle=False).map(lambda sample: sample.json()["id"]).batch(4)
        >>> pipeline.take(2)
        [tensor([0, 1, 2, 3]), tensor([4, 5, 6, 7])]
        >>> pipeline
        └─ Batcher(size=4)
           └─ Encode(<lambda>)
              └─ read('shards/', shuffle=False)
    """

    step: PipelineStep
    """The last step, which has the steps before it."""
    _yields: ClassVar[str] = ""  # kind of the elements, for messages
    _advice: ClassVar[Mapping[str, str]] = {}  # advice by the name of a method that only other kinds of pipelines have

    def __call__(self, lane: Lane) -> Any:
        """Build the stages for a lane, and return the last one.

        Args:
            lane: The lane, as a loader makes it.

        Raises:
            ValueError: A setting is wrong.
            ShardError: Files cannot be read.
        """
        return self.step.build(lane, one_pass=False)

    def __iter__(self) -> Iterator[Any]:
        """Yield the elements of a single pass over the data, in one lane with seed 0. Its end closes the files."""
        shared: dict[Any, Any] = {}
        lane = Lane(worker=WorkerContext(shared=shared))
        try:
            with as_in_a_worker(set(KINDS)):
                last = self.step.build(lane, one_pass=True)
            excluded = last.info.excluded if last.yields == "samples" else ()
            end: Any = object()
            while True:
                with as_in_a_worker(set(KINDS)):  # the caller's global generators stay unchanged
                    element: Any = next(last, end)
                if element is end:
                    return
                if not excluded or element.index not in excluded:
                    yield element
        except (SavableError, TypeError, ValueError) as error:
            raise shortened(error) from error.__cause__
        finally:
            shared.clear()

    def take(self, n: int) -> list[Any]:
        """Return the first elements of a pass, and close the files.

        Args:
            n: The most elements to return. There are fewer only if the pass has fewer.

        Example:
            >>> [sample.key for sample in sp.read("shards/", shuffle=False).take(2)]
            ['s000000', 's000001']
        """
        return list(islice(self, n))

    def __len__(self) -> int:
        """Return the number of elements of a single pass. Opens the files.

        Raises:
            TypeError: The number cannot be known before the elements are built.
        """
        count = count_of(self.step.build(Lane(), one_pass=True), lane=0, epoch=0)
        if count is None:
            raise TypeError(
                "the length of this pipeline is not known. Only sp.read(...) alone has one; sp.SavableLoader(pipeline, "
                "seed=0), and no other loader, yields the pipeline's batches."
            )
        return count

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return self.step.tree()

    def _then(
        self, kind: type[AnyPipeline], stage: Callable[..., Stage], *arguments: Any, **options: Any
    ) -> AnyPipeline:
        """Return a pipeline of the class `kind` with one more step, which builds its stage by calling `stage`."""
        return kind(PipelineStep.of(stage, {ALONE: self.step}, *arguments, **options))

    @overload
    def then(self, stage: type[BatchStage], *arguments: Any, **options: Any) -> BatchPipeline: ...
    @overload
    def then(self, stage: type[ItemStage], *arguments: Any, **options: Any) -> ItemPipeline: ...
    @overload
    def then(self, stage: type[SampleStage], *arguments: Any, **options: Any) -> SamplePipeline: ...
    def then(self, stage: type[Stage], *arguments: Any, **options: Any) -> Pipeline:
        """Add your own stage: `stage(source, *arguments, **options)`.

        Args:
            stage: A class derived from `SampleStage`, `ItemStage` or `BatchStage`.
            *arguments: Further arguments, after the source.
            **options: Keyword arguments.

        Raises:
            ValueError: `stage` is not such a class.

        Example:
            >>> class Even(custom.PassThrough, custom.SampleStage):
            ...     def __next__(self):
            ...         return next(sample for sample in self.source if sample.json()["id"] % 2 == 0)
            >>> [sample.key for sample in sp.read("shards/", shuffle=False).then(Even).take(2)]
            ['s000000', 's000002']
        """
        pipeline_classes = {BatchStage: BatchPipeline, ItemStage: ItemPipeline, SampleStage: SamplePipeline}
        for base, pipeline_class in pipeline_classes.items():
            if isinstance(stage, type) and issubclass(stage, base):
                return pipeline_class(PipelineStep(stage.__name__, stage, arguments, options, {ALONE: self.step}))
        raise ValueError(
            f".then takes a subclass of custom.SampleStage, custom.ItemStage or custom.BatchStage, not {stage!r}. "
            "Pass a function to .map or .filter."
        )

    if not TYPE_CHECKING:  # otherwise a type checker would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if name in self._advice:
                raise AttributeError(f".{name} does not take {self._yields}. {self._advice[name]}")
            steps = [step for step in dir(type(self)) if step[0] != "_"]
            hint = "" if name[0] == "_" else closest(name, steps, ".")
            hint = f" {_METHOD_ADVICE[name]}" if name in _METHOD_ADVICE else hint
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.{hint}")


class BatchPipeline(Pipeline):
    """A pipeline of batches, for a loader. Only `.then` adds a step to it."""

    __slots__ = ()
    _yields = "batches"
    _advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("shuffle", "filter", "map", "encode", "pack", "balance", "batch", "bucket", "clips"), "Put it before .batch."
    )


class ItemPipeline(Pipeline):
    """A pipeline of items or packs.

    `.map`, `.encode`, `.clips` and `.pack` return one.
    """

    __slots__ = ()
    _yields = "items"
    _advice: ClassVar[Mapping[str, str]] = {
        "map": "Samples are encoded once: call both functions in one .map.",
        "encode": "Samples are encoded once: write both steps into one encoder.",
        "clips": "Use it instead of .encode.",
    }

    def shuffle(self, size: int, *, max_buffer_bytes: int | None = None) -> Self:
        """Shuffle items in a buffer: `sp.ShuffleBuffer`.

        Args:
            size: The number of items in the buffer.
            max_buffer_bytes: As for `sp.ShuffleBuffer`.
        """
        check_count("ShuffleBuffer", "size", size)
        return self._then(type(self), ShuffleBuffer, size=size, max_buffer_bytes=max_buffer_bytes)

    def filter(self, function: Callable[[Any], bool], *, on_error: OnError = "raise") -> Self:
        """Drop items for which `function(item)` is false, and count them as "filtered".

        Args:
            function: Returns whether to yield an item, which must depend on the item alone.
            on_error: For an item for which `function` raises, as for `sp.Encode`.

        Example:
            >>> numbers = sp.read("shards/", shuffle=False).map(lambda sample: sample.json()["id"])
            >>> numbers.filter(lambda number: number % 100 == 5).take(3)
            [5, 105, 205]
        """
        check_mapped(".filter", function, most=1)
        check_on_error(".filter", on_error)
        return self._then(type(self), Filter, function, on_error=on_error)

    def pack(
        self,
        max_length: int,
        *,
        policy: Policy | PackingFunction = "best_fit",
        open_packs: int = 16,
        max_images: int | None = None,
        max_cost: int | None = None,
        cost: Cost | None = None,
        too_long: TooLong | None = None,
        max_buffer_bytes: int = 1 << 30,
        encoder: TaskEncoder | None = None,
    ) -> ItemPipeline:
        """Join items into packs of at most `max_length` tokens: `sp.OnlinePacker`.

        Args:
            max_length: The most tokens of a pack.
            policy: As for `sp.OnlinePacker`, like the other arguments.
            open_packs: The most open packs.
            max_images: The most images in a pack.
            max_cost: The most `cost` in a pack.
            cost: `cost(length, images)`.
            too_long: What happens to longer items.
            max_buffer_bytes: The most bytes of items in all open packs of a process.
            encoder: Measures, cuts and packs items.
        """
        options = _stage_options(locals())
        check_packing(options)
        return self._then(ItemPipeline, OnlinePacker, **options)

    def balance(
        self, candidates: int, *, cost: Cost, max_buffer_bytes: int = 1 << 30, encoder: TaskEncoder | None = None
    ) -> ItemPipeline:
        """Balance the costs of the packs that the ranks of a step get: `sp.Balance`.

        Args:
            candidates: The number of waiting packs in each lane.
            cost: `cost(length, images)`, such as `sp.attention_cost(hidden=2048)`.
            max_buffer_bytes: As for `sp.Balance`, like `encoder`.
            encoder: Measures items.
        """
        options = _stage_options(locals())
        check_count("Balance", "candidates", candidates)
        check_cost("Balance", cost)
        return self._then(ItemPipeline, Balance, **options)

    def batch(self, size: int, *, drop_last: bool | None = None, encoder: TaskEncoder | None = None) -> BatchPipeline:
        """Combine `size` items or packs into batches: `sp.Batcher`.

        Args:
            size: The number of items or packs in a batch.
            drop_last: As for `sp.Batcher`, like `encoder`.
            encoder: Builds the batches.
        """
        check_count("Batcher", "size", size)
        return self._then(BatchPipeline, Batcher, size=size, drop_last=drop_last, encoder=encoder)

    def bucket(
        self,
        bounds: Sequence[int] = (),
        *,
        size: BatchSize | Mapping[Group, BatchSize] | Callable[[Group], int] | None = None,
        max_tokens: int | None = None,
        group: Callable[[Any], Group] | str | None = None,
        drop_last: bool | None = None,
        same_bucket: bool = False,
        candidates: int = 32,
        encoder: TaskEncoder | None = None,
    ) -> BatchPipeline:
        """Combine items of similar length, or of one group: `custom.BucketBatcher`.

        Args:
            bounds: The greatest length of each bucket.
            size: As for `custom.BucketBatcher`, like the other arguments.
            max_tokens: The most tokens of a padded batch, instead of `size`.
            group: Only items of one group share a batch.
            drop_last: Whether to drop the remaining items at the end.
            same_bucket: Whether the ranks of a step should get batches of the same bucket.
            candidates: The number of full batches in each lane for `same_bucket`.
            encoder: Measures items and builds the batches.
        """
        options = _stage_options(locals())
        check_count("BucketBatcher", "candidates", candidates)
        BucketSizes(bounds, size, max_tokens, grouped=group is not None)
        if group is not None and not isinstance(group, str):
            check_function("BucketBatcher", "group", group)
        return self._then(BatchPipeline, BucketBatcher, **options)


class SamplePipeline(Pipeline):
    """A pipeline of samples.

    `sp.read`, `sp.blend`, `sp.join` and `sp.mixture` return one.
    """

    __slots__ = ()
    _yields = "samples"
    _advice: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("pack", "balance", "bucket"), "Add .encode(encoder) or .map(function) before it."
    )

    def shuffle(self, size: int) -> Self:
        """Shuffle samples in a buffer, which has only their refs: `sp.ShuffleBuffer`.

        Args:
            size: The number of samples in the buffer of each lane.
        """
        check_count("ShuffleBuffer", "size", size)
        return self._then(type(self), ShuffleBuffer, size=size)

    def filter(
        self,
        function: Callable[..., bool],
        *,
        on_error: OnError = "raise",
        global_rng: bool | tuple[str, ...] | None = None,
    ) -> Self:
        """Drop samples for which `function(sample)` or `function(sample, rng)` is false.

        They are counted as "filtered".

        The filter runs in each epoch. Put a slow one into the encoder, as a `Skip`, or into a file for `exclude=`.

        Args:
            function: Returns whether to yield a sample, which must depend on the sample and `rng` alone.
            on_error: For a sample for which `function` raises, as for `sp.Encode`.
            global_rng: See `TaskEncoder.global_rng`.

        Raises:
            ValueError: `function` is not such a function.

        Example:
            >>> even = sp.read("shards/", shuffle=False).filter(lambda sample: sample.json()["id"] % 2 == 0)
            >>> [sample.key for sample in even.take(3)]
            ['s000000', 's000002', 's000004']
        """
        check_mapped(".filter", function, most=2)
        check_on_error(".filter", on_error)
        return self._then(type(self), Filter, function, on_error=on_error, global_rng=global_rng)

    def map(
        self,
        function: Callable[..., Any],
        *,
        on_error: OnError = "raise",
        max_errors: int | float = 0.1,
        check: float | None = None,
        global_rng: bool | tuple[str, ...] | None = None,
        one_to_one: bool = False,
    ) -> ItemPipeline:
        """Encode samples by `function(sample)` or `function(sample, rng)`.

        An item is a dict, a tensor, or any other value except None.

        A `Skip` drops the sample, and a generator yields several items. Batches stack items as torch's
        `default_collate` does. To pack items, write a `TaskEncoder`.

        Args:
            function: Depends on the sample and `rng` alone. Its name, and the arguments that a `functools.partial`
                binds, are compared when a state is loaded.
            on_error: As for `sp.Encode`.
            max_errors: How many samples a lane may skip because of errors: a count, or as a float a fraction.
            check: The fraction of samples to encode twice, to compare both results. None: the first 8 of a process.
            global_rng: See `TaskEncoder.global_rng`.
            one_to_one: Whether the function returns exactly one item for every sample.

        Raises:
            ValueError: The function takes neither `(sample)` nor `(sample, rng)`.

        Example:
            >>> def crop(sample, rng):
            ...     left = rng.integers(5)
            ...     return {"pixels": torch.tensor(np.asarray(sample.image())[:4, left : left + 4])}
            >>> sp.read("shards/").map(crop).batch(2).take(1)[0]["pixels"].shape
            torch.Size([2, 4, 4, 3])
        """
        encoder = MappedFunction(".map", function, global_rng=global_rng, one_to_one=one_to_one)
        return self.encode(encoder, on_error=on_error, max_errors=max_errors, check=check)

    def encode(
        self,
        encoder: TaskEncoder | Callable[[], TaskEncoder],
        *,
        on_error: OnError = "raise",
        max_errors: int | float = 0.1,
        check: float | None = None,
    ) -> ItemPipeline:
        """Encode samples by an encoder: `sp.Encode`.

        Args:
            encoder: The encoder, or a function that builds it once per process. Pass a function if the encoder is too
                large to be sent to workers.
            on_error: As for `sp.Encode`, like the other arguments.
            max_errors: The most samples that a lane may skip because of errors.
            check: The fraction of samples to encode twice. None: the first 8 of a process.

        Raises:
            ValueError: `encoder` is no encoder and no such function, or a setting is wrong.
        """
        if not is_maker(encoder):
            check_encoder(".encode", encoder)
        check_limits("Encode", on_error, max_errors)
        check_share(check)
        return self._then(ItemPipeline, Encode, encoder, on_error=on_error, max_errors=max_errors, check=check)

    def clips(
        self,
        clips: Clips,
        *,
        video: str | bool = True,
        audio: str | bool = False,
        rate: int | None = None,
        on_error: OnError = "raise",
    ) -> ItemPipeline:
        """Encode each clip of a video, of audio or of both as an item.

        An item is a dict of "frames", "times_s" and "audio".

        Args:
            clips: Which clips to take.
            video: The name of the part; True: the first video part; False: no video.
            audio: The name of the part; True: the first audio part; False: no audio.
            rate: The sampling rate to which audio is resampled, in Hz. None: unchanged.
            on_error: As for `sp.Encode`.

        Raises:
            ValueError: Both `video` and `audio` are False.

        Example:
            ```python
            films = sp.read("films/").clips(sp.Clips(length_s=2.0, fps=8, count=2, size=(224, 224)))
            films.batch(4).take(1)[0]["frames"]  # uint8 (4, 16, 3, 224, 224)
            ```
        """
        return self.encode(ClipEncoder(clips, video=video, audio=audio, rate=rate), on_error=on_error)

    def batch(self, size: int, *, drop_last: bool | None = None, encoder: TaskEncoder | None = None) -> BatchPipeline:
        """Combine samples into lists, or by the `batch` of an encoder: `sp.Batcher`.

        Args:
            size: The number of samples in a batch.
            drop_last: As for `sp.Batcher`, like `encoder`.
            encoder: Builds the batches.
        """
        check_count("Batcher", "size", size)
        return self._then(BatchPipeline, Batcher, size=size, drop_last=drop_last, encoder=encoder)

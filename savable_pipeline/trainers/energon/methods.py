"""`Methods`: the methods of an Energon `TaskEncoder` with our random numbers.

`@stateless(restore_seeds=True)` wraps a method in one that seeds Python, NumPy and torch from the worker and a counter,
which takes 185 µs per call. We call the method inside, after seeding the three from the key of the sample, pack or
batch. We also do that for methods without the decorator, so an encoder without it is exact too.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from megatron.energon import NoCachePool, TaskEncoder, WorkerConfig
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless

from savable_pipeline.core.global_rng import seeder
from savable_pipeline.core.rng import Rng
from savable_pipeline.errors import EncodeError

_INDEX_BITS = 31  # bits of `current_sample_index`, few enough to seed any generator


class _UnknownBatchIndex:
    """Unknown batch index. Any use of it raises EncodeError."""

    def __mul__(self, _: Any) -> NoReturn:
        raise EncodeError(
            "current_batch_index is not known yet. Use it in `batch` or `encode_batch`, or use current_sample_index."
        )


class _SingleWorkerConfig(WorkerConfig):  # type: ignore[misc]
    """Configuration of the only worker of the only rank. It is valid in any process, unlike Energon's own."""

    __slots__ = ()

    def rank_worker_id(self) -> int:
        return 0


class IndexContext:
    """Context in which Energon's encoder sees `current_sample_index`.

    In `batch`, the encoder sees `current_batch_index` too. Each encoder has one `IndexContext`, used as
    `with index_context.at(key):`. Such blocks must not be nested, as in Energon's own loader.
    """

    def __init__(self) -> None:
        self._config = _SingleWorkerConfig(rank=0, world_size=1, num_workers=0)
        self._cache = NoCachePool()
        self._unknown = _UnknownBatchIndex()
        self._index = 0
        self._batch: Any = self._unknown

    def at(self, key: int, batch: int | None = None) -> IndexContext:
        """Return this context at one sample.

        Its sample index is taken from a 64-bit key, and the index of a batch is set if known.
        """
        self._index = key >> (64 - _INDEX_BITS)
        self._batch = self._unknown if batch is None else batch
        return self

    def __enter__(self) -> None:
        self._config.worker_activate(self._batch, cache_pool=self._cache)
        self._config.worker_push_sample_index(self._index)

    def __exit__(self, *_: object) -> None:
        self._config.worker_pop_sample_index()
        self._config.worker_deactivate()

    def __reduce__(self) -> Any:
        return IndexContext, ()


_UNSUPPORTED = (
    "build_batch",
    "build_cook_crude_sample",
    "build_encode_sample",
    "build_train_datasets",
    "build_val_datasets",
    "_load_dataset",
)
# methods that must not write to the encoder, and methods that must not be generators
_PER_SAMPLE = ("cook_crude_sample", "encode_sample", "preencode_sample", "postencode_sample", "pack_selected_samples")
_PER_CALL = ("batch", "encode_batch", "pack_selected_samples", "select_samples_to_pack", "batch_group_criterion")
_BATCHING = ("batch", "encode_batch")
_ENERGON_MODULE = "megatron.energon"
_SUBJECT = "energon_subject"


class Methods:
    """The methods of an encoder by name.

    They are called without the wrappers that seed generators.

    Raises TypeError for an encoder that cannot be resumed exactly. The message says what to change.

    Attributes:
        overridden: The names of the methods that the encoder's author wrote.
    """

    def __init__(self, encoder: Any, *, packing: bool) -> None:
        if not isinstance(encoder, TaskEncoder):
            raise TypeError(f"task_encoder must be a TaskEncoder of Energon, not {encoder!r}")
        self._encoder = encoder
        self._seed = seeder(True)
        self._check_supported(packing=packing)
        self.overridden = {name for name in (*_PER_SAMPLE, *_PER_CALL) if self._overrides(name)}
        self._unwrapped = {name: _unwrapped(getattr(encoder, name)) for name in (*_PER_SAMPLE, *_PER_CALL)}
        self._wrapped = {name for name in self._unwrapped if _restores_seeds(getattr(encoder, name))}

    def _overrides(self, name: str) -> bool:
        method = getattr(self._encoder, name)
        return getattr(method, "__func__", None) is not getattr(TaskEncoder, name)

    def _check_supported(self, *, packing: bool) -> None:
        """Raise TypeError if the encoder overrides a method that cannot be supported."""
        name = type(self._encoder).__name__
        for method in _UNSUPPORTED:
            if self._overrides(method):
                raise TypeError(
                    f"{name}.{method} is not supported. Delete it, and write it as a stage after "
                    "FromEnergon(task_encoder)."
                )
        for method in _PER_SAMPLE:
            if self._overrides(method) and self._writes_to_self(method):
                raise TypeError(
                    f"{name}.{method} is not @stateless and writes to self. Keep no state in the encoder, or mark "
                    "it if results do not change."
                )
        for method in _PER_CALL:
            if inspect.isgeneratorfunction(_unwrapped(getattr(self._encoder, method))):
                raise TypeError(
                    f"{name}.{method} must not be a generator. Yield from encode_sample, or select smaller groups "
                    "in select_samples_to_pack."
                )
        if self._overrides("preencode_sample") and self._overrides_encode():
            raise TypeError(f"{name} has encode_sample and preencode_sample. Write only one of them.")
        can_pack = self._overrides("select_samples_to_pack") and self._overrides("pack_selected_samples")
        if packing and not can_pack:
            raise TypeError(f"packing needs select_samples_to_pack and pack_selected_samples of {name}")
        if method_name := next(self._methods_with_batch_index(), None):
            raise TypeError(
                f"{name}.{method_name} uses current_batch_index too early. Use it in `batch` or `encode_batch`, or use "
                "current_sample_index."
            )

    def _writes_to_self(self, method: str) -> bool:
        """Return whether a method that is not marked as @stateless assigns to attributes of the encoder."""
        function = getattr(self._encoder, method)
        code = getattr(_unwrapped(function), "__code__", None)
        if get_stateless(function) or code is None or not code.co_varnames:
            return False
        loaded: Any = None  # the name that the previous instruction loaded, as a tuple of one
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR" and loaded == code.co_varnames[:1]:
                return True
            names = instruction.argval
            loaded = names[-1:] if isinstance(names, tuple) else (names,)
        return False

    def _overrides_encode(self) -> bool:
        return not str(self._encoder.encode_sample.__module__).startswith(_ENERGON_MODULE)

    def _methods_with_batch_index(self) -> Iterator[str]:
        """Yield the names of the user's methods that use `current_batch_index` before there is a batch."""
        for name, member in inspect.getmembers(type(self._encoder), inspect.isfunction):
            code = getattr(_unwrapped(member), "__code__", None)
            is_checked = name not in _BATCHING and not str(member.__module__).startswith(_ENERGON_MODULE)
            if is_checked and code is not None and "current_batch_index" in code.co_names:
                yield name

    def call(self, name: str, argument: Any, rng: Rng, *, seeded: bool) -> Any:
        """Call a method, and return its result.

        `seeded` says that the caller has just seeded the generators. If not, they are seeded here before a method whose
        wrapper by Energon would do so.
        """
        if not seeded and name in self._wrapped and self._seed is not None:
            self._seed(rng.bits())
        with recording_subject(argument):
            return self._unwrapped[name](argument)

    @property
    def tolerance(self) -> int:
        """Number of errors in a row that Energon tolerates in encoding; 0: no limit."""
        name = "preencode_sample" if "preencode_sample" in self.overridden else "encode_sample"
        default = type(self._encoder).__default_failure_tolerance__
        return int(get_failure_tolerance(getattr(self._encoder, name), default))


class recording_subject:  # a class, because a generator would take three times as long per call
    """Context that records in an error the sample or list that was processed.

    `subject_of(error)` returns it.
    """

    def __init__(self, subject: Any) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is not None and not hasattr(error, _SUBJECT):
            setattr(error, _SUBJECT, self._subject)


def subject_of(error: BaseException) -> Any:
    """Return the sample, or the list of samples, whose processing raised an error.

    It is a list if a pack or batch was built, and None if it is unknown. Energon's error handlers get it.
    """
    return getattr(error, _SUBJECT, None)


def _restores_seeds(method: Any) -> bool:
    return bool(getattr(method, "__stateless__", False)) and hasattr(method, "__wrapped__")


def _unwrapped(method: Any) -> Callable[..., Any]:
    """Return a method without the wrapper that restores seeds, bound as it was."""
    if not _restores_seeds(method):
        return method  # type: ignore[no-any-return]
    inner, owner = method.__wrapped__, getattr(method, "__self__", None)
    return inner if owner is None else inner.__get__(owner)  # type: ignore[no-any-return]

"""`OnDevice`: batches of a loader on the training device, moved one step ahead.

    loader ── next ──▶ pinned memory ── copy, on a stream of its own ──▶ GPU ── waits for that copy ──▶ trainer
                                                                          └ one batch ahead

The loader is then one batch further than the trainer. A saved state is the trainer's: the position after the last batch
that it got, which is stored with the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from savable_pipeline.core.containers import with_parts_changed
from savable_pipeline.run.loader.misuse import caller, reject_dataset, warn_unsaved
from savable_pipeline.run.loader.observers import Trace
from savable_pipeline.run.loader.position import Position
from savable_pipeline.run.loader.savable_loader import SavableLoader, run_of, settings_of
from savable_pipeline.trainers.trainer_loader import reject_acknowledging

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_AHEAD = 1  # batches that are moved before the trainer asks for them


class OnDevice:
    """Wraps a loader so that its batches are on a device, moved one batch ahead.

    It replaces the loader for iterating, saving and loading. `state_dict()` is the state after the last batch that the
    *trainer* got. Use the loader only through it: while one batch is ahead, the loader's own saving, loading and
    skipping raise `SavableError`. An error of the loader is raised instead of its batch, not one batch early.

    On a GPU, tensors pass through pinned memory (the loader's, with `pin_memory=True`) by asynchronous copies on a
    stream of their own. The trainer's stream waits for those of its batch. On other devices they are moved when they
    are taken, and on the CPU they stay in place. Other values stay unchanged, in containers of the same kinds.

    Args:
        loader: The loader to wrap.
        device: The device of the tensors, such as "cuda:0".
        repeat: How many times each batch is yielded, for measuring (default 1). A repeated batch is the same object and
            takes no time, as if data were free. A state after any repetition is that after the first.

    Example:
        >>> from savable_pipeline.trainers.device import OnDevice
        >>> class Numbers(sp.TaskEncoder):
        ...     def encode(self, sample, rng):
        ...         return {"id": sample.json()["id"]}
        >>> def pipeline(lane):
        ...     return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Numbers()), size=4)
        >>> batches = OnDevice(sp.SavableLoader(pipeline, seed=7), "cpu")
        >>> first, state, second = next(batches), batches.state_dict(), next(batches)  # {"id": int64 (4,)}
        >>> again = sp.SavableLoader(pipeline, seed=7)  # the state is a loader's
        >>> again.load_state_dict(state)
        >>> bool((next(again)["id"] == second["id"]).all())
        True
    """

    def __init__(self, loader: SavableLoader, device: str | torch.device, *, repeat: int = 1) -> None:
        import torch

        if repeat < 1:
            raise ValueError(f"repeat must be at least 1, not {repeat}")
        reject_acknowledging(loader)
        self.loader = loader
        self.device = torch.device(device)
        self._move = _move_function(self.device)
        self._run = run_of(loader)
        self._run.check_not_ahead()
        self._progress = _SharedProgress(_Progress(self._run.position))
        self._run.is_ahead = self._progress.has_ahead
        self._repeat = repeat
        self._repeats = list[Any]()  # the last batch, as often as it is still to be yielded
        self._error: Exception | None = None  # raised by the loader when the next batch was fetched

    @property
    def epoch(self) -> int:
        """Epoch of the last batch, as `SavableLoader.epoch`."""
        return self._run.epoch_of(self._progress.current.yielded)

    def __iter__(self) -> OnDevice:
        warn_unsaved(caller(), self._run.position, restarts_on_iter=self._run.settings.restarts_on_iter)
        self._repeats = []
        if settings_of(self.loader).on_iter == "restart":  # the first iteration after a load continues
            self._progress.current = _Progress(self._progress.current.yielded)
        if not self._progress.current.ahead:
            self._error = None
            self._run.undo_fetch(self._progress.current.yielded)
            iter(self.loader)
            self._progress.current = _Progress(self._run.position)
        return self

    def __next__(self) -> Any:
        if self._repeats:
            return self._repeats.pop()
        self._fetch(1 + _AHEAD)
        if not self._progress.current.ahead:
            error, self._error = self._error, None
            assert error is not None
            self._progress.current = _Progress(self._run.position)
            raise error
        (first, position), *later = self._progress.current.ahead
        batch = first.wait()
        self._repeats = [batch] * (self._repeat - 1)
        # This line is the last one, because an interrupt before it must not lose the batch.
        self._progress.current = _Progress(position, tuple(later))
        return batch

    def _fetch(self, count: int) -> None:
        """Fetch batches until `count` are ahead, or the loader ends or fails."""
        if self._error is None:
            self._run.undo_fetch(self._progress.current.last)  # undoes a fetch that was interrupted
        while len(self._progress.current.ahead) < count and self._error is None:
            try:
                batch = next(self.loader)
            except Exception as error:
                self._error = error
                return
            self._progress.current = self._progress.current.with_batch(_Transfer(batch, self._move), self._run.position)
        for transfer, _ in self._progress.current.ahead:
            transfer.start()

    def __len__(self) -> int:
        """Return the number of batches in an epoch, as `len(loader)`, times `repeat`."""
        return len(self.loader) * self._repeat

    def __bool__(self) -> bool:
        return True

    @property
    def dataset(self) -> Any:
        """Raise AttributeError, as for the loader."""
        reject_dataset()

    def skip(self, slots: int) -> None:
        """Skip slots after the last batch, as `SavableLoader.skip`.

        Args:
            slots: How many slots, of all ranks together.
        """
        # If the loader has ended, and `__next__` has not raised that StopIteration yet, it raises it after the skip.
        # `ahead` are the batches that are fetched and not yet yielded.
        error = self._error if isinstance(self._error, StopIteration) and not self._progress.current.ahead else None
        self._run.undo_fetch(self._progress.current.yielded)
        self._progress.current, self._error, self._repeats = _Progress(self._run.position), error, []
        self.loader.skip(slots)
        self._progress.current = _Progress(self._run.position)

    def trace(self, *, lag: int = 0) -> Trace:
        """Return the samples of the last batch, as `SavableLoader.trace`.

        Args:
            lag: How many batches before that one. 0 (default) is the last batch.
        """
        return self.loader.trace(lag=lag + len(self._progress.current.ahead))

    def close(self) -> None:
        """Stop the workers, as `loader.close()`.

        Iterating again continues after the last batch.
        """
        self.loader.close()

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self, *, lag: int = 0) -> dict[str, Any]:
        """Return the state after the last batch, as `SavableLoader.state_dict`.

        Args:
            lag: How many batches the trainer itself is ahead (default 0). The state is that many batches earlier.
        """
        return self._run.state_dict(lag, position=self._progress.current.yielded)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Iterable[str] = ()) -> None:
        """Resume from a saved state, as `SavableLoader.load_state_dict`.

        A batch moved ahead is dropped.

        Args:
            state: A state of this loader, or of any other of the same run.
            allow: Names of fields that may differ from the saved ones.
        """
        self._run.load_state_dict(state, allow)
        self._progress.current, self._error, self._repeats = _Progress(self._run.position), None, []

    def save_state(self) -> dict[str, Any]:
        """Return `state_dict()`."""
        return self.state_dict()

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Call `load_state_dict(state)`.

        Args:
            state: As for `load_state_dict`.
        """
        self.load_state_dict(state)

    def global_state_dict(self, group: dist.ProcessGroup | None = None, *, lag: int = 0) -> dict[str, Any]:
        """Return the state with the lanes of all ranks, on each of them. Collective.

        Args:
            group: The process group of the data-parallel ranks. None (default): that of the loader.
            lag: As for `state_dict`.
        """
        return self._run.global_state(group, position=self._progress.current.yielded, lag=lag)


class _Progress(NamedTuple):
    """Batches yielded and ahead, in one value that an interrupt cannot split."""

    yielded: Position  # position of the loader after the last batch yielded
    # the batches that are not yielded yet, with the loader's position after each
    ahead: tuple[tuple[_Transfer, Position], ...] = ()

    @property
    def last(self) -> Position:
        """Position of the loader after the last batch that is yielded or ahead."""
        return self.ahead[-1][1] if self.ahead else self.yielded

    def with_batch(self, transfer: _Transfer, after: Position) -> _Progress:
        """Return this progress with one more batch ahead.

        `after` is the loader's position after this batch.
        """
        return self._replace(ahead=(*self.ahead, (transfer, after)))


class _SharedProgress:
    """Progress that the loader's run can read without a reference to the `OnDevice`."""

    def __init__(self, current: _Progress) -> None:
        self.current = current

    def has_ahead(self) -> bool:
        """Return whether batches are ahead of the trainer."""
        return bool(self.current.ahead)


class _Transfer:
    """Transfer of a batch to the device.

    If the move cannot be started, the object stays unchanged, so `start` can be called again.
    """

    def __init__(self, batch: Any, move: Callable[[Any], Callable[[], Any]]) -> None:
        self._batch = batch
        self._move: Callable[[Any], Callable[[], Any]] | None = move
        self._wait: Callable[[], Any] | None = None  # returns the moved batch

    def start(self) -> None:
        """Start to move the batch, unless the move has started already."""
        if self._move is not None:
            self._wait = self._move(self._batch)
            self._batch = self._move = None

    def wait(self) -> Any:
        """Return the batch on the device, and wait for it if needed."""
        self.start()
        assert self._wait is not None
        return self._wait()


def _move_function(device: torch.device) -> Callable[[Any], Callable[[], Any]]:
    """Return the function that starts moving a batch to a device.

    That function returns one that waits for the moved batch.
    """
    if device.type == "cuda":
        import torch

        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"OnDevice: torch sees {torch.cuda.device_count()} CUDA devices here, so there is no {str(device)!r}. "
                "Check the driver and CUDA_VISIBLE_DEVICES, or take OnDevice(loader, 'cpu')"
            )
        return _CudaCopies(device).start

    def move(batch: Any) -> Callable[[], Any]:
        moved = tensors_changed(batch, lambda tensor: tensor.to(device))
        return lambda: moved

    return move


class _CudaCopies:
    """Copies to a GPU on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, batch: Any) -> Callable[[], Any]:
        """Queue the copies of a batch, and return a function that waits for them."""
        import torch

        with torch.cuda.stream(self._stream):
            copied = tensors_changed(batch, self._start_copy)
            return partial(self._after_copies, copied, self._stream.record_event())

    def _start_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _after_copies(self, batch: Any, copied: torch.cuda.Event) -> Any:
        """Make the current stream wait for the event `copied`, and return the copied batch.

        Torch does not reuse the memory of the copies before that stream has used them.
        """
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)

        def record_use(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return tensors_changed(batch, record_use)


def tensors_changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a function to each tensor of a batch, in containers of the same kinds.

    Args:
        value: A batch, or a part of one.
        change: Returns what replaces a tensor.

    Returns:
        The batch with the new tensors.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    return with_parts_changed(value, lambda part: tensors_changed(part, change))

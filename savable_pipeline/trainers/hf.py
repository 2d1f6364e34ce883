"""The loader in Hugging Face's `Trainer`: `SavableTrainer`, or the mixin `SavableData` before another trainer.

A checkpoint holds the state of all ranks, which is written first; the trainer's own state is written last:

checkpoint-4/   savable_loader.json   model   optimizer   trainer_state.json
checkpoint-8/   savable_loader.json   model                                     the run was killed here: passed over
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from savable_pipeline.core.files import replace_file
from savable_pipeline.errors import StateError
from savable_pipeline.run.loader.position import MAX_LAG
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.checks import length_of, restarting
from savable_pipeline.trainers.forms import from_json, to_json
from savable_pipeline.trainers.whole import Whole

log = logging.getLogger(__name__)


class SavableData:
    """A mixin that gives a `Trainer` its batches: `class MyTrainer(SavableData, SFTTrainer)`.

    `train_loader` is a `SavableLoader`, `eval_loader` one with `on_iter="restart"` or a dict of them by name; make them
    after the `TrainingArguments`, which begin torch.distributed. Each checkpoint holds the lanes of all ranks;
    `train(resume_from_checkpoint=…)` goes on there, on any number of ranks.
    Raises ValueError for arguments under which a resumed run would be another: without `ignore_data_skip=True` the
    trainer would skip batches that the state has passed already.
    """

    args: Any
    eval_dataset: Any

    def __init__(
        self, *args: Any, train_loader: SavableLoader | None = None, eval_loader: Any = None, **kwargs: Any
    ) -> None:
        if eval_loader is not None:
            kwargs.setdefault("eval_dataset", eval_loader)
        super().__init__(*args, **kwargs)
        _check_arguments(self.args, eval_loader)
        if eval_loader is not None and not (self.label_names or self.can_return_loss):  # type: ignore[attr-defined]
            log.warning(
                'evaluations will have no eval_loss: the model\'s forward names no argument with "label" in it, so '
                "say in TrainingArguments(label_names=[…]) which fields of a batch are labels"
            )
        self._batches: Whole | None = None
        if train_loader is not None:
            counter = _Counter()
            self._batches = counter.batches = Whole(
                # where it knows no length, gradients of an epoch's last batches wait for the next one's first step
                train_loader,
                trained=lambda: counter.trained,
                begun=lambda: counter.begun,
                carries=True,
            )
            self._counter = counter
            self.add_callback(counter)  # type: ignore[attr-defined]

    def get_train_dataloader(self) -> Any:
        """The batches to train on."""
        return self._batches if self._batches is not None else super().get_train_dataloader()  # type: ignore[misc]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of one step of the optimizer, which are fetched before any is trained on."""
        batches, *rest = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self._batches is not None:
            self._counter.begun += len(batches)
        return batches, *rest

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader to evaluate on: `eval_dataset`, or that under this name, or the one that was given."""
        found = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        found = self.eval_dataset if found is None else found
        return _evaluated(found) or super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader that `predict` was given."""
        return _evaluated(test_dataset) or super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the state of the data, then the model: a checkpoint with a model in it has both."""
        if _internal_call and output_dir is not None and self._batches is not None:
            try:
                state = self._batches.state_dict()
            except BaseException:
                if self.args.should_save:
                    take_away(Path(output_dir))
                raise
            if self.args.should_save:
                begin(Path(output_dir), state)
        super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint on if one is named; True means the newest that is whole.

        Raises `StateError` for a checkpoint that is not whole, or lacks the state of the data.
        """
        found = resume_from_checkpoint
        max_steps = self.args.max_steps
        if found and self._batches is not None:
            folder = newest_whole(Path(self.args.output_dir)) if found is True else Path(found)
            if folder is not None:
                self._batches.load_state_dict(read_state(folder))
                self.args.max_steps = _last_step(self.args, self._batches, folder / "trainer_state.json")
                _warn_of_forgotten(self.args, self.callback_handler.callbacks)  # type: ignore[attr-defined]
                found = str(folder)
        try:
            return super().train(found, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.max_steps = max_steps


class SavableTrainer(SavableData, Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer`, on loaders of savable_pipeline; arguments as of `SavableData`.

    ```python
    from savable_pipeline.trainers.hf import SavableTrainer

    SavableTrainer.__mro__[1].__name__  # 'SavableData'
    ```
    """


class _Counter(TrainerCallback):  # type: ignore[misc]
    """Counts the batches that the optimizer has stepped on, and checks at each step that none was skipped."""

    batches: Whole

    def __init__(self) -> None:
        self.begun = 0
        self.trained = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _check_accumulation(args, self.batches)
        self.batches.give_back()  # those of a step that was interrupted, whose gradients are gone

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trained = self.begun

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (control.should_epoch_stop or control.should_training_stop):
            _check_steps(self.batches.ahead, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches.check()


def _check_arguments(args: Any, eval_loader: Any) -> None:
    if not args.ignore_data_skip:
        raise ValueError(
            "TrainingArguments needs ignore_data_skip=True: the state of the loader says where to go on, and skipping "
            "beside it would leave batches out"
        )
    if args.deepspeed and getattr(args, "enable_jit_checkpoint", False):
        raise ValueError(
            "enable_jit_checkpoint=True saves before the trainer counts a step, but DeepSpeed has taken it by then: "
            "its batches would be trained on twice. Save by save_steps"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True begins again with smaller batches; the pipeline makes the batches")
    restarting(eval_loader)


def _evaluated(given: Any) -> SavableLoader | None:
    """A loader to evaluate on, if it is one of ours. Raises ValueError for one that goes on where it was broken off."""
    found = restarting(given)
    return found if isinstance(found, SavableLoader) else None


def _warn_of_forgotten(args: Any, callbacks: list[Any]) -> None:
    """Name the callbacks whose counts a checkpoint holds, and the trainer does not restore unless it is told to."""
    names = [type(callback).__name__ for callback in callbacks if isinstance(callback, ExportableState)]
    if names and not args.restore_callback_states_from_checkpoint:
        log.warning(
            "the resumed run may end at another step: %s begins anew (EarlyStoppingCallback forgets its patience) "
            "unless TrainingArguments has restore_callback_states_from_checkpoint=True",
            ", ".join(names),
        )


def _check_accumulation(args: Any, batches: Whole) -> None:
    """Raise ValueError where an epoch's last gradients would be carried into the next one, but only after a resume."""
    steps = args.gradient_accumulation_steps
    if steps > MAX_LAG:
        raise ValueError(
            f"gradient_accumulation_steps={steps}: a checkpoint takes back at most {MAX_LAG} batches that the "
            "optimizer has not stepped on. Accumulate fewer, larger batches"
        )
    length = length_of(batches)
    in_mid_epoch = args.save_strategy not in ("no", "epoch") or getattr(args, "enable_jit_checkpoint", False)
    if length and length % steps and in_mid_epoch:
        raise ValueError(
            f"an epoch has {length} batches, which gradient_accumulation_steps={steps} does not divide: resumed in "
            "mid-epoch, the trainer would leave out its last step. Take a number that divides, save_strategy='epoch' "
            "without enable_jit_checkpoint, or an endless pipeline (epochs=None) with max_steps"
        )


def _check_steps(waiting: int, steps: int) -> None:
    """Raise ValueError where so many batches wait at an epoch's end that no epoch is long enough for a step."""
    if waiting >= steps:
        raise ValueError(
            f"the optimizer has not stepped on the last {waiting} batches, and never would: the trainer counts the "
            f"gradient_accumulation_steps={steps} of a step anew in each epoch, and an epoch has fewer batches. "
            "Accumulate fewer, or take an endless pipeline (epochs=None)"
        )


def _last_step(args: Any, batches: Whole, trainer_state: Path) -> int:
    """`max_steps` for `num_train_epochs` of a run that other ranks began: the trainer takes all steps for its own.

    3 epochs of 18 slots, begun by one rank, are 8 steps of one slot and 23 of two: 31, where the trainer would stop at
    27. On as many ranks as before it is what it was given.
    """
    given = batches.given_of_epoch if args.max_steps <= 0 and trainer_state.exists() else None
    if given is None:
        return int(args.max_steps)
    saved = json.loads(trainer_state.read_bytes())
    of_epoch = math.ceil(len(batches) / args.gradient_accumulation_steps)
    in_all = math.ceil(args.num_train_epochs * of_epoch)
    if saved["max_steps"] == in_all:
        return int(args.max_steps)
    done = batches.epoch * of_epoch + math.ceil(given / args.gradient_accumulation_steps)
    last: int = saved["global_step"] + in_all - done
    if last != in_all:
        log.warning(
            "resumed on another number of ranks: %s epochs end after step %d, not %d",
            args.num_train_epochs,
            last,
            in_all,
        )
    return last


DATA_FILE = "savable_loader.json"
_BEGUN = "checkpoint-is-incomplete.txt"  # what the trainer marks a folder with that it makes on SIGTERM


def begin(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the data into the folder of a checkpoint, of which the trainer writes the rest behind it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # of one that was saved here before
    replace_file(folder / DATA_FILE, [json.dumps(to_json(state)).encode()], sync=True)


def take_away(folder: Path) -> None:
    """Remove a folder that the trainer made for a checkpoint, if nothing was saved in it."""
    with suppress(OSError):
        (folder / _BEGUN).unlink(missing_ok=True)
        folder.rmdir()


def newest_whole(output_dir: Path) -> Path | None:
    """The newest checkpoint that was saved to its end; a warning names newer ones. None if there is none at all.

    Raises `StateError` if none is whole.
    """
    numbered = {int(path.name[11:]): path for path in output_dir.glob("checkpoint-*") if path.name[11:].isdecimal()}
    passed_over: list[str] = []
    for _, folder in sorted(numbered.items(), reverse=True):
        lacks = _lacks(folder)
        if lacks is None:
            if passed_over:
                log.warning("resuming from %s; newer, but not whole: %s", folder, "; ".join(passed_over))
            return folder
        passed_over.append(f"{folder.name}, whose {lacks}")
    if passed_over:
        raise StateError(f"{output_dir} has no checkpoint that is whole, only {'; '.join(passed_over)}")
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """The state of the data in a checkpoint. Raises `StateError` if the checkpoint is not whole."""
    if lacks := _lacks(folder):
        raise StateError(
            f"{folder} is not whole: its {lacks}. Resume from another (resume_from_checkpoint=True takes the newest "
            "whole one), or load a state that you saved yourself into the loader and pass the trainer no checkpoint"
        )
    file = folder / DATA_FILE
    try:
        return from_json(json.loads(file.read_bytes()))
    except ValueError as error:
        raise StateError(f"{file}: no JSON ({error}); resume from another checkpoint") from error


def _lacks(folder: Path) -> str | None:
    """What a checkpoint lacks, in words that follow "whose"; None if it is whole."""
    if not (folder / DATA_FILE).exists():
        return f"{DATA_FILE} is not there: it was saved without SavableTrainer, or a save ended before it began"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_bytes())
    except FileNotFoundError:
        return f"{TRAINER_STATE_NAME}, which is written last, is not there: the run ended while it was saved"
    except ValueError as error:
        return f"{TRAINER_STATE_NAME}, which is written last, is no JSON ({error}): the run ended while it was saved"
    return None

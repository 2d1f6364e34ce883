"""The loader in Hugging Face's trainers: `SavableTrainer`, `SavableDataMixin`.

`SavableDataMixin` goes before a trainer in a list of base classes. A checkpoint is complete if it has both the state
of all ranks, which is written first, and the trainer's state, which is written last:

    checkpoint-4/   savable_loader.json   model   optimizer   trainer_state.json     complete
    checkpoint-8/   savable_loader.json   model                                      killed: skipped
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from savable_pipeline.core.files import replace_file
from savable_pipeline.errors import StateError
from savable_pipeline.run.loader.position import MAX_LAG
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.run.state.state_dict import JSON_FILE, from_json, to_json
from savable_pipeline.trainers.model_inputs import check_inputs, has_packs, model_inputs
from savable_pipeline.trainers.trainer_loader import TrainerLoader, check_peers, check_restarting, length_of

__all__ = ["SavableDataMixin", "SavableTrainer", "model_inputs"]

log = logging.getLogger(__name__)

_INCOMPLETE = "checkpoint-is-incomplete.txt"  # the trainer's file in a checkpoint that it is writing on SIGTERM
_SFT_SETTINGS = ("max_length", "completion_only_loss", "assistant_only_loss", "dataset_text_field")


class SavableDataMixin:
    """Mixin that supplies a `Trainer` with batches.

    Use it as `class MyTrainer(SavableDataMixin, SFTTrainer)`. Each checkpoint has the lanes of all ranks, and
    `train(resume_from_checkpoint=…)` resumes there on any number of ranks. `TrainingArguments` needs
    `ignore_data_skip=True`. Otherwise the trainer would skip batches again that the state has already passed.

    Args:
        *args: Arguments of the trainer.
        train_loader: The batches to train on. Create it after the `TrainingArguments`, which start torch.distributed.
        eval_loader: A loader made with `on_iter="restart"`, or a dict of them by name.
        **kwargs: Arguments of the trainer.

    Raises:
        ValueError: With these arguments a resumed run would see other batches.
    """

    args: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self, *args: Any, train_loader: SavableLoader | None = None, eval_loader: Any = None, **kwargs: Any
    ) -> None:
        if eval_loader is not None:
            kwargs.setdefault("eval_dataset", eval_loader)
        if train_loader is not None:
            kwargs = _with_dummy_dataset(args, kwargs)
        super().__init__(*args, **kwargs)
        _check_arguments(self.args, eval_loader)
        if eval_loader is not None and not (self.label_names or self.can_return_loss):  # type: ignore[attr-defined]
            log.warning(
                'evaluations have no eval_loss, because forward has no argument with "label". Set '
                "TrainingArguments(label_names=[...])."
            )
        self._batches: TrainerLoader | None = None
        self._steps_done = 0  # steps of the checkpoint from which `train` resumes
        if train_loader is not None:
            counter = _BatchCounter(_repeats_per_batch(self.args))
            # A batch counts as started from its first repeat on, and as trained on after its last one. If the length is
            # unknown, gradients of an epoch's last batches are used in the first step of the next epoch (`carries`).
            self._batches = counter.batches = TrainerLoader(
                self._check_shared(train_loader),
                trained=lambda: counter.trained // counter.repeats,
                begun=lambda: math.ceil(counter.begun / counter.repeats),
                carries=True,
            )
            self._counter = counter
            self.add_callback(counter)  # type: ignore[attr-defined]
            _warn_of_unused_settings(self.args, self.train_dataset)

    def get_train_dataloader(self) -> Any:
        """Return the batches to train on."""
        if self._batches is None:
            return super().get_train_dataloader()  # type: ignore[misc]
        return self._batches if self._counter.repeats == 1 else _Repeated(self._batches, self.args)

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's epochs and steps, with 0 epochs if the run has ended.

        The trainer itself would train for one more step before it noticed.

        Args:
            *args: As for the trainer.
            **kwargs: As for the trainer.
        """
        epochs, *rest, max_steps = super().set_initial_training_values(*args, **kwargs)  # type: ignore[misc]
        if self._batches is not None and self._steps_done >= max_steps:
            log.warning(
                "the resumed run has ended at step %d of %d. Raise max_steps or num_train_epochs to train further.",
                self._steps_done,
                max_steps,
            )
            epochs = 0
        return epochs, *rest, max_steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one optimizer step, which the trainer fetches together.

        Args:
            *args: As for the trainer.
            **kwargs: As for the trainer.
        """
        batches, *rest = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if self._batches is not None:
            if batches and not self._counter.begun:
                _check_first_batch(batches[0], self)
            self._counter.begun += len(batches)
        return batches, *rest

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader to evaluate on.

        Args:
            eval_dataset: A loader, or the name of one. None (default): the `eval_loader` of the constructor.
        """
        chosen = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        chosen = self.eval_dataset if chosen is None else chosen
        return self._evaluation_loader(chosen) or super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the loader for `predict`.

        Args:
            test_dataset: A loader with `on_iter="restart"`, or a dataset of the trainer.
        """
        return self._evaluation_loader(test_dataset) or super().get_test_dataloader(test_dataset)  # type: ignore[misc]

    def _evaluation_loader(self, loader: Any) -> SavableLoader | None:
        """Return the loader if it is a `SavableLoader`, else None.

        Raises ValueError for a `SavableLoader` that does not restart at each evaluation.
        """
        check_restarting(self._check_shared(loader))
        return loader if isinstance(loader, SavableLoader) else None

    def _check_shared(self, loader: Any) -> Any:
        """Return the loader. Raises ValueError if processes that need the same batches would get different ones."""
        sizes = {name: getattr(self, f"get_{name}_size")() for name in ("tp", "cp", "sp")}
        mesh = f"args.parallelism_config.get_device_mesh({self.args.device.type!r})"
        return check_peers(loader, self.accelerator.num_processes, sizes, mesh)  # type: ignore[attr-defined]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the state of the data, and then the model.

        In this order, each checkpoint that has a model also has the state.

        Args:
            output_dir: The folder of the checkpoint.
            _internal_call: Whether the trainer calls it for a checkpoint.
        """
        if _internal_call and output_dir is not None and self._batches is not None:
            try:
                state = self._batches.state_dict()
            except BaseException:
                if self.args.should_save:
                    remove_empty_checkpoint(Path(output_dir))
                raise
            if self.args.should_save:
                start_checkpoint(Path(output_dir), state)
        with _loadable_weight_names(self.model if _internal_call else None):  # type: ignore[attr-defined]
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise StateError if a checkpoint has weights under other names. The trainer calls this after loading."""
        missing, unexpected = load_result.missing_keys, load_result.unexpected_keys
        if missing and unexpected:
            raise StateError(
                f"the checkpoint lacks {len(missing)} weights, such as {missing[0]!r}, and has {unexpected[0]!r}. "
                "Rewrite it: from_pretrained(checkpoint), then save_pretrained(checkpoint, "
                "save_original_format=False)."
            )
        super()._issue_warnings_after_load(load_result)  # type: ignore[misc]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, and resume from a checkpoint if one is named.

        Args:
            resume_from_checkpoint: The folder of a checkpoint. True: the newest complete one. None (default) or False:
                start at the first batch.
            *args: As for the trainer.
            **kwargs: As for the trainer.

        Raises:
            StateError: The checkpoint is incomplete, or lacks the state of the data.
        """
        checkpoint = resume_from_checkpoint
        max_steps = self.args.max_steps
        if not checkpoint and self._batches is not None:
            _warn_of_ignored_checkpoint(Path(self.args.output_dir))
        if checkpoint and self._batches is not None:
            folder = newest_whole(Path(self.args.output_dir)) if checkpoint is True else Path(checkpoint)
            if folder is not None:
                self._batches.load_state_dict(read_state(folder))
                saved = json.loads((folder / TRAINER_STATE_NAME).read_bytes())
                self._steps_done = saved["global_step"]
                self.args.max_steps = _last_step(self.args, self._batches, self._counter.repeats, saved)
                _warn_of_missing_state(self.args, self.callback_handler.callbacks)  # type: ignore[attr-defined]
                checkpoint = str(folder)
        try:
            return super().train(checkpoint, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.max_steps, self._steps_done = max_steps, 0


class SavableTrainer(SavableDataMixin, Trainer):  # type: ignore[misc]
    """Hugging Face's `Trainer`, on loaders of savable_pipeline.

    Args:
        *args: Arguments of the trainer.
        train_loader: The batches to train on. Create it after the `TrainingArguments`, which start torch.distributed.
        eval_loader: A loader made with `on_iter="restart"`, or a dict of them by name.
        **kwargs: Arguments of the trainer.

    Example:
        ```python
        from savable_pipeline.trainers.hf import SavableTrainer

        SavableTrainer.__mro__[1].__name__  # 'SavableDataMixin'
        ```
    """


class _Repeated:
    """Batches of prompts, each yielded as many times in a row as TRL's GRPO requests it.

    GRPO generates completions when it first gets a batch. At each repeat it trains on the next slice of them, and
    `num_iterations` times on each slice.
    """

    def __init__(self, batches: TrainerLoader, args: Any) -> None:
        self._batches = batches
        self._steps = args.steps_per_generation
        self._repeats = _repeats_per_batch(args)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            if isinstance(batch, list) and len(batch) % self._steps:
                raise ValueError(
                    f"a batch of {len(batch)} rows does not divide into steps_per_generation={self._steps} slices. "
                    "Use batches of per_device_train_batch_size x steps_per_generation rows."
                )
            for _ in range(self._repeats):
                yield batch

    def __len__(self) -> int:
        return self._repeats * len(self._batches)


class _BatchCounter(TrainerCallback):  # type: ignore[misc]
    """Counts the batches that the optimizer has stepped on, and detects skipped batches at each step.

    If the trainer takes each batch `repeats` times, each time counts.
    """

    batches: TrainerLoader

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.begun = 0  # batches that the trainer has fetched for a step
        self.trained = 0  # those that the optimizer has stepped on

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        _check_accumulation(args, self.batches, self.repeats)
        self.batches.rewind()  # the batches of an interrupted step, whose gradients are lost
        self.begun = self.trained = self.trained // self.repeats * self.repeats  # whole batches

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trained = self.begun

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not (control.should_epoch_stop or control.should_training_stop):
            _check_epoch_has_step(self.begun - self.trained, args.gradient_accumulation_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.batches.check()


def _check_arguments(args: Any, eval_loader: Any) -> None:
    """Raise ValueError for arguments that would repeat or skip batches."""
    if not args.ignore_data_skip:
        raise ValueError(
            "set TrainingArguments(ignore_data_skip=True), because the state of the loader says where to resume"
        )
    if args.deepspeed and getattr(args, "enable_jit_checkpoint", False):
        raise ValueError("enable_jit_checkpoint=True would repeat batches with DeepSpeed. Use save_steps instead.")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True is not supported. Set the batch size in the pipeline.")
    check_restarting(eval_loader)


@contextmanager
def _loadable_weight_names(model: Any) -> Iterator[None]:
    """Save weights under the names that the trainer needs to load them.

    By default, `save_pretrained` uses the names of a model's first release, as for Qwen2.5-VL and LLaVA. On a resume,
    the trainer would find none of its weights, log a warning, and continue with the weights that it started with.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
    replaced = vars(model).get("save_pretrained")  # None unless the object itself has this attribute
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    try:
        yield
    finally:
        del model.save_pretrained
        if replaced is not None:
            model.save_pretrained = replaced


def _with_dummy_dataset(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, with a dummy dataset for TRL's `SFTTrainer`.

    `SFTTrainer` requires a dataset, and must not prepare it. Raises ValueError if its settings ask it to pack.
    """
    config = next((value for value in (*args, *kwargs.values()) if hasattr(value, "dataset_kwargs")), None)
    if config is None:  # the trainer is not TRL's
        return kwargs
    if config.packing or config.padding_free:
        raise ValueError(
            "packing and padding_free of SFTConfig are not supported. Use .pack(max_length=...) in the pipeline."
        )
    from datasets import Dataset

    config.dataset_kwargs = {**(config.dataset_kwargs or {}), "skip_prepare_dataset": True}
    dummy = Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    # Without a collator, the trainer looks for columns of a dataset.
    return {"train_dataset": dummy, "data_collator": list, **kwargs}


def _check_first_batch(batch: Any, trainer: Any) -> None:
    """Raise ValueError if the model would misread the first batch, or mix the documents of its packs."""
    check_inputs(batch, trainer.model)
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None and parallel.cp_enabled and has_packs(batch):
        raise ValueError("context parallelism has only the causal mask, which mixes documents. Remove the packer.")


def _repeats_per_batch(args: Any) -> int:
    """Return how many times in a row the trainer takes each batch.

    This is 1, except for trainers with these settings, such as TRL's GRPO.
    """
    return (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)


def _warn_of_unused_settings(args: Any, dataset: Any) -> None:
    """Warn of batch settings that have no effect on the batches of a loader."""
    names = _SFT_SETTINGS if hasattr(args, "completion_only_loss") else ()  # an attribute of TRL's SFTConfig alone
    if not hasattr(args, "steps_per_generation"):  # TRL's GRPO cuts a batch into parts of this size
        names = ("per_device_train_batch_size", *names)
    defaults = {field.name: field.default for field in fields(args)}
    unused = [f"{name}={getattr(args, name)!r}" for name in names if getattr(args, name, None) != defaults.get(name)]
    if dataset is not None and getattr(dataset, "num_rows", 0) != 1:  # a dummy dataset has one row
        unused.append("train_dataset")
    if unused:
        log.warning("ignored: %s. The pipeline defines the batches.", ", ".join(unused))


def _warn_of_ignored_checkpoint(output_dir: Path) -> None:
    """Warn that the run loads none of the checkpoints in its folder that have a state of the data, if there are any."""
    if saved := sorted(output_dir.glob(f"checkpoint-*/{JSON_FILE}")):
        log.warning(
            "%s has %s, but the run starts at the first batch. Call train(resume_from_checkpoint=True), or use "
            "another output_dir.",
            output_dir,
            saved[-1].parent.name,
        )


def _warn_of_missing_state(args: Any, callbacks: list[Any]) -> None:
    """Warn of state that checkpoints lack, or that the trainer restores only on request."""
    if args.save_only_model:
        log.warning(
            "save_only_model=True drops the optimizer, so losses differ after a resume. Remove it to resume exactly."
        )
    names = [type(callback).__name__ for callback in callbacks if isinstance(callback, ExportableState)]
    if names and not args.restore_callback_states_from_checkpoint:
        log.warning(
            "the resumed run may end at another step, because %s restarts. Set "
            "restore_callback_states_from_checkpoint=True.",
            ", ".join(names),
        )


def _check_accumulation(args: Any, batches: TrainerLoader, repeats: int) -> None:
    """Raise ValueError if a resumed run would accumulate gradients over an epoch's end.

    An uninterrupted run does not, so the two would differ.
    """
    accumulated = args.gradient_accumulation_steps
    if accumulated > MAX_LAG * repeats:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated} exceeds the limit of {MAX_LAG}. Use fewer, larger batches."
        )
    length = repeats * (length_of(batches) or 0)
    saves_within_epochs = args.save_strategy not in ("no", "epoch") or getattr(args, "enable_jit_checkpoint", False)
    if length and length % accumulated and saves_within_epochs:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated} does not divide the {length} batches of an epoch. Change it, "
            "or use epochs=None with max_steps, or save_strategy='epoch' without enable_jit_checkpoint."
        )


def _check_epoch_has_step(waiting: int, accumulated: int) -> None:
    """Raise ValueError if an epoch has too few batches for a step.

    At its end, `waiting` batches are not stepped on yet. A step takes `accumulated` batches.
    """
    if waiting >= accumulated:
        raise ValueError(
            f"the optimizer never takes the last {waiting} batches, because gradient_accumulation_steps={accumulated} "
            "exceeds an epoch. Lower it, or use epochs=None."
        )


def _last_step(args: Any, batches: TrainerLoader, repeats: int, saved: dict[str, Any]) -> int:
    """Return the `max_steps` at which `num_train_epochs` end, also if the number of ranks has changed.

    The trainer counts the steps as if all had its current number of ranks. Example: 3 epochs have 54 slots, and one
    rank has trained on 8 of them, in 8 steps. Two ranks then train on the other 46 in 23 steps, so the run ends after
    31 steps. The trainer would stop after 54 / 2 = 27. On the same number of ranks as before, the result is
    `args.max_steps`.

    `saved` is the trainer's saved state. The trainer takes each batch `repeats` times, see `_repeats_per_batch`.
    """
    batches_done = batches.yielded_of_epoch if args.max_steps <= 0 else None
    if batches_done is None:
        return int(args.max_steps)
    epoch_steps = math.ceil(repeats * len(batches) / args.gradient_accumulation_steps)
    all_steps = math.ceil(args.num_train_epochs * epoch_steps)
    if saved["max_steps"] == all_steps and repeats == 1:
        return int(args.max_steps)
    done_steps = batches.epoch * epoch_steps + math.ceil(repeats * batches_done / args.gradient_accumulation_steps)
    last_step: int = saved["global_step"] + all_steps - done_steps
    if last_step != all_steps:
        log.warning(
            "the number of ranks has changed, or TRL's generations are repeated. %s epochs end after step %d, not %d.",
            args.num_train_epochs,
            last_step,
            all_steps,
        )
    return last_step


def start_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the data into a checkpoint.

    The trainer writes the rest afterwards.

    Args:
        folder: The folder of the checkpoint, which is created if necessary.
        state: The state with the lanes of all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # left by an earlier checkpoint in this folder
    replace_file(folder / JSON_FILE, [json.dumps(to_json(state)).encode()], sync=True)


def remove_empty_checkpoint(folder: Path) -> None:
    """Remove the folder of a checkpoint if nothing was saved in it.

    Args:
        folder: The folder of the checkpoint.
    """
    with suppress(OSError):
        (folder / _INCOMPLETE).unlink(missing_ok=True)
        folder.rmdir()


def newest_whole(output_dir: Path) -> Path | None:
    """Return the newest complete checkpoint, and warn of newer incomplete ones.

    Args:
        output_dir: The trainer's folder, which has the `checkpoint-…` folders.

    Returns:
        Its folder, or None if there is no checkpoint at all.

    Raises:
        StateError: There are checkpoints, but none is complete.
    """
    names = {path.name.removeprefix("checkpoint-"): path for path in output_dir.glob("checkpoint-*")}
    numbered = {int(name): path for name, path in names.items() if name.isdecimal()}
    incomplete: list[str] = []
    for _, folder in sorted(numbered.items(), reverse=True):
        problem = _problem_of(folder)
        if problem is None:
            if incomplete:
                log.warning("resuming from %s. Newer checkpoints are incomplete: %s", folder, "; ".join(incomplete))
            return folder
        incomplete.append(f"{folder.name}, whose {problem}")
    if incomplete:
        raise StateError(f"{output_dir} has no complete checkpoint: {'; '.join(incomplete)}. Use another folder.")
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state of the data in a checkpoint.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        The state with the lanes of all ranks.

    Raises:
        StateError: The checkpoint is incomplete.
    """
    if problem := _problem_of(folder):
        raise StateError(
            f"{folder} is incomplete, its {problem}. Pass resume_from_checkpoint=True for the newest complete one, or "
            "load a state into the loader yourself."
        )
    file = folder / JSON_FILE
    try:
        return from_json(json.loads(file.read_bytes()))
    except ValueError as error:
        raise StateError(f"{file}: no JSON ({error}). Resume from another checkpoint.") from error


def _problem_of(folder: Path) -> str | None:
    """Return what is missing in a checkpoint, in words that follow "whose"; None if it is complete."""
    if not (folder / JSON_FILE).exists():
        return f"{JSON_FILE} is not there: it was saved without SavableTrainer, or a save ended before it began"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_bytes())
    except FileNotFoundError:
        return f"{TRAINER_STATE_NAME}, which is written last, is not there: the run ended while it was saved"
    except ValueError as error:
        return f"{TRAINER_STATE_NAME}, which is written last, is no JSON ({error}): the run ended while it was saved"
    return None

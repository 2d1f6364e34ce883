"""The loader in DeepSpeed: `prepare` it, and save its state in `client_state`."""

from __future__ import annotations

from deepspeed import DeepSpeedEngine

from savable_pipeline.errors import SavableError
from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.device import tensors_changed
from savable_pipeline.trainers.trainer_loader import TrainerLoader


def prepare(engine: DeepSpeedEngine, loader: SavableLoader) -> TrainerLoader:
    """Wrap a loader for DeepSpeed.

    It replaces `training_data=` of `deepspeed.initialize`.

    `engine.save_checkpoint(folder, client_state={"data": batches.state_dict()})`, on every rank, saves the lanes of all
    ranks after the last batch taken. `batches.load_state_dict(client_state["data"])`, with the `client_state` that
    `engine.load_checkpoint` returned, resumes there on any number of ranks.

    Args:
        engine: The engine of the run, from `deepspeed.initialize`.
        loader: The loader, created after `deepspeed.initialize`, which starts torch.distributed.

    Returns:
        The batches to train on, on the engine's device. Their `state_dict()` raises `SavableError` between two steps of
        the optimizer, because the gradients of some micro-batches would be lost.

    Example:
        ```python
        from types import SimpleNamespace

        from savable_pipeline.trainers.deepspeed import prepare

        engine = SimpleNamespace(device="cpu", micro_steps=0, gradient_accumulation_steps=lambda: 1)

        class Labels(sp.TaskEncoder):
            def encode(self, sample, rng):
                return int(sample["cls"])

        def pipeline(lane):
            return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Labels()), size=4)

        batches = prepare(engine, sp.SavableLoader(pipeline, seed=7))
        len(next(iter(batches)))  # 4
        ```
    """
    return _BetweenSteps(engine, loader)


class _BetweenSteps(TrainerLoader):
    """Loader that saves only if the engine has no pending gradients.

    Its checkpoints do not contain them.
    """

    def __init__(self, engine: DeepSpeedEngine, loader: SavableLoader) -> None:
        super().__init__(
            loader, to_device=lambda batch: tensors_changed(batch, lambda t: t.to(engine.device, non_blocking=True))
        )
        self._engine = engine

    def check(self) -> None:
        """Raise `SavableError` also if the engine has taken only part of a global batch."""
        super().check()
        steps = self._engine.gradient_accumulation_steps()
        if done := self._engine.micro_steps % steps:
            raise SavableError(
                f"the gradients of {done} of {steps} micro-batches would be lost. Save only where "
                f"engine.micro_steps is a multiple of {steps}."
            )

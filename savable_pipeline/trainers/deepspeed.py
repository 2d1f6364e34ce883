"""The loader in DeepSpeed, whose state is saved in `client_state`."""

from __future__ import annotations

from deepspeed import DeepSpeedEngine

from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.device import tensors_changed
from savable_pipeline.trainers.trainer_loader import BetweenSteps, TrainerLoader, check_peers


def prepare_for_engine(engine: DeepSpeedEngine, loader: SavableLoader) -> TrainerLoader:
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

    Raises:
        ValueError: The loader has more ranks than the engine has data-parallel ranks.

    Example:
        ```python
        from types import SimpleNamespace

        from savable_pipeline.trainers.deepspeed import prepare_for_engine

        one = {"world_size": 1, "dp_world_size": 1, "gradient_accumulation_steps": lambda: 1}
        engine = SimpleNamespace(device="cpu", micro_steps=0, **one)

        class Labels(sp.TaskEncoder):
            def encode(self, sample, rng):
                return int(sample["cls"])

        def pipeline(lane):
            return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Labels()), size=4)

        batches = prepare_for_engine(engine, sp.SavableLoader(pipeline, seed=7))
        len(next(iter(batches)))  # 4
        ```
    """
    sizes = {"model_parallel": engine.world_size // engine.dp_world_size}
    check_peers(loader, engine.world_size, sizes, "mesh")
    return BetweenSteps(
        loader,
        lambda batch: tensors_changed(batch, lambda tensor: tensor.to(engine.device, non_blocking=True)),
        lambda: (engine.micro_steps, engine.gradient_accumulation_steps()),
        "engine.micro_steps is a multiple of gradient_accumulation_steps",
    )

"""The loader in Accelerate: `prepare` adds it to `save_state` and `load_state`."""

from __future__ import annotations

from functools import partial

from accelerate import Accelerator
from accelerate.utils import send_to_device

from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.trainer_loader import BetweenSteps, TrainerLoader, check_peers


def prepare(accelerator: Accelerator, loader: SavableLoader) -> TrainerLoader:
    """Wrap a loader for Accelerate, which then saves and loads its state.

    Call it once for each loader, instead of `accelerator.prepare`. Batches arrive on the accelerator's device.
    `accelerator.save_state` then saves the lanes of all ranks after the last batch taken, and `load_state` resumes
    there on any number of ranks.

    Args:
        accelerator: The accelerator of the run.
        loader: The loader, created after the `Accelerator`, which starts torch.distributed.

    Returns:
        The batches to train on, already registered for checkpointing. `save_state` raises `SavableError` between two
        steps of the optimizer, because the gradients of some batches would be lost.

    Example:
        ```python
        from accelerate import Accelerator
        from savable_pipeline.trainers.accelerate import prepare

        accelerator = Accelerator(cpu=True)

        class Labels(sp.TaskEncoder):
            def encode(self, sample, rng):
                return int(sample["cls"])

        def pipeline(lane):
            return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Labels()), size=4)

        batches = prepare(accelerator, sp.SavableLoader(pipeline, seed=7))
        len(next(iter(batches)))  # 4
        ```
    """
    if config := accelerator.parallelism_config:
        sizes = {"tp": config.tp_size, "cp": config.cp_size, "sp": config.sp_size}
        check_peers(loader, accelerator.num_processes, sizes, "accelerator.torch_device_mesh")
    to_device = partial(send_to_device, device=accelerator.device, non_blocking=True)

    def counts() -> tuple[int, int]:
        return accelerator.step, accelerator.gradient_accumulation_steps

    batches = BetweenSteps(loader, to_device, counts, "accelerator.sync_gradients is True")
    accelerator.register_for_checkpointing(batches)
    return batches

"""The loader in Lightning Fabric: `prepare` it, and name it in what `fabric.save` and `fabric.load` are given."""

from __future__ import annotations

from lightning.fabric import Fabric

from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.trainer_loader import TrainerLoader


def prepare(fabric: Fabric, loader: SavableLoader) -> TrainerLoader:
    """Wrap a loader for Fabric, in place of `fabric.setup_dataloaders`, which takes no other loader: batches on its
    device.

    Name it in `fabric.save(path, {"model": model, "data": batches})`, which saves the lanes of all ranks after the
    batch taken last; `fabric.load(path, {…})` continues there on any number of ranks.

    Args:
        fabric: The Fabric of the run.
        loader: Made after `fabric.launch()`, which starts torch.distributed.

    Returns:
        The batches to train on.

    Example:
        ```python
        from lightning.fabric import Fabric
        from savable_pipeline.trainers.fabric import prepare

        fabric = Fabric(accelerator="cpu")

        class Labels(sp.TaskEncoder):
            def encode(self, sample, rng):
                return int(sample["cls"])

        def pipeline(lane):
            return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Labels()), size=4)

        batches = prepare(fabric, sp.SavableLoader(pipeline, seed=7))
        len(next(iter(batches)))  # 4
        ```
    """
    return TrainerLoader(loader, place=fabric.to_device)

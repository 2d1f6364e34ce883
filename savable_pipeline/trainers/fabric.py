"""The loader in Lightning Fabric, saved with `fabric.save`."""

from __future__ import annotations

from typing import Any

from lightning.fabric import Fabric

from savable_pipeline.run.loader.savable_loader import SavableLoader
from savable_pipeline.trainers.trainer_loader import TrainerLoader, check_peers


def setup_loader(fabric: Fabric, loader: SavableLoader) -> TrainerLoader:
    """Wrap a loader for Fabric, instead of `fabric.setup_dataloaders`.

    `setup_dataloaders` takes only torch's loaders. Batches arrive on Fabric's device. Include the result in
    `fabric.save(path, {"model": model, "data": batches})`, which saves the lanes of all ranks after the last batch
    taken. `fabric.load(path, {…})` resumes there on any number of ranks.

    Args:
        fabric: The Fabric of the run.
        loader: The loader, created after `fabric.launch()`, which starts torch.distributed.

    Returns:
        The batches to train on.

    Raises:
        ValueError: The strategy has tensor-parallel processes, which would get other batches.

    Example:
        ```python
        from lightning.fabric import Fabric
        from savable_pipeline.trainers.fabric import setup_loader

        fabric = Fabric(accelerator="cpu")

        class Labels(sp.TaskEncoder):
            def encode(self, sample, rng):
                return int(sample["cls"])

        def pipeline(lane):
            return sp.Batcher(sp.Encode(sp.TarShardReader("shards/", lane), Labels()), size=4)

        batches = setup_loader(fabric, sp.SavableLoader(pipeline, seed=7))
        len(next(iter(batches)))  # 4
        ```
    """
    check_peers(loader, fabric.world_size, shared_sizes(fabric.strategy), "fabric.strategy.device_mesh")
    return TrainerLoader(loader, to_device=fabric.to_device)


def shared_sizes(strategy: Any) -> dict[str, int]:
    """Return the size, by name, of each mesh dimension that shares batches.

    Processes along such a dimension need the same batches.

    Args:
        strategy: A strategy of Fabric or of Lightning's `Trainer`.
    """
    mesh: Any = getattr(strategy, "device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None) or ()
    return {name: mesh[name].size() for name in names if name == "tensor_parallel"}

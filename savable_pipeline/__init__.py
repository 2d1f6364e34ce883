"""Savable data loading: a training run that is stopped and resumed sees the same batches, bit for bit.

    tar shards ─ TarShardReader ─ ShuffleBuffer ─ Encode(TaskEncoder) ─ OnlinePacker ─ Batcher ─ SavableLoader

`sp.blend` merges several sources, before or after Encode.

`sp.read(…).shuffle(…).encode(…).pack(…).batch(…)` names these stages; the loader builds them for each lane (a logical
worker), runs all lanes, in this process or in worker processes, and keeps the state of each lane with every batch.
`savable_pipeline.custom` has what stages, stores and pipelines of one's own are made of.
"""

import importlib
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from savable_pipeline.core.batch_memory import empty, stack
    from savable_pipeline.core.lane import Lane
    from savable_pipeline.core.rng import Rng
    from savable_pipeline.data.dataset.opening import open_dataset
    from savable_pipeline.data.dataset.sample import Sample
    from savable_pipeline.data.media.clips import Clips
    from savable_pipeline.errors import CheckpointMismatchError, EncodeError, SavableError, ShardError, WorkerError
    from savable_pipeline.run.engine.worker_settings import Workers
    from savable_pipeline.run.loader.ledger import Ledger
    from savable_pipeline.run.loader.ranks import Ranks
    from savable_pipeline.run.loader.savable_loader import SavableLoader
    from savable_pipeline.run.loader.settings import Acknowledge
    from savable_pipeline.run.loader.stateful_dataset import StatefulDataset
    from savable_pipeline.run.nodes.ray_workers import RayWorkers
    from savable_pipeline.run.nodes.socket_workers import SocketWorkers
    from savable_pipeline.run.state.state_dict import merge_states
    from savable_pipeline.stages.batcher import Batcher
    from savable_pipeline.stages.blending.blend import Blend
    from savable_pipeline.stages.blending.schedule import Schedule
    from savable_pipeline.stages.cost import attention_cost
    from savable_pipeline.stages.encode import Encode
    from savable_pipeline.stages.packing.balance import Balance
    from savable_pipeline.stages.packing.packer import OnlinePacker
    from savable_pipeline.stages.pipeline_starts import blend, join, mixture, read
    from savable_pipeline.stages.pipeline_value import Pipeline
    from savable_pipeline.stages.readers.readers import TarShardReader
    from savable_pipeline.stages.shuffle_buffer import ShuffleBuffer
    from savable_pipeline.stages.task_encoder import Decoded, Skip, TaskEncoder
    from savable_pipeline.tools.convert.conversion import convert
    from savable_pipeline.tools.convert.shard_writer import ShardWriter

__version__ = "0.1.0"

__all__ = [
    "Acknowledge",
    "Balance",
    "Batcher",
    "Blend",
    "CheckpointMismatchError",
    "Clips",
    "Decoded",
    "Encode",
    "EncodeError",
    "Lane",
    "Ledger",
    "OnlinePacker",
    "Pipeline",
    "Ranks",
    "RayWorkers",
    "Rng",
    "Sample",
    "SavableError",
    "SavableLoader",
    "Schedule",
    "ShardError",
    "ShardWriter",
    "ShuffleBuffer",
    "Skip",
    "SocketWorkers",
    "StatefulDataset",
    "TarShardReader",
    "TaskEncoder",
    "WorkerError",
    "Workers",
    "attention_cost",
    "blend",
    "convert",
    "empty",
    "join",
    "merge_states",
    "mixture",
    "open_dataset",
    "read",
    "stack",
]


# Where each name lies: a program imports what it uses, and `savable convert` starts at once.
_PLACES = {
    "Acknowledge": "run.loader.settings",
    "Balance": "stages.packing.balance",
    "Batcher": "stages.batcher",
    "Blend": "stages.blending.blend",
    "CheckpointMismatchError": "errors",
    "Clips": "data.media.clips",
    "Decoded": "stages.task_encoder",
    "Encode": "stages.encode",
    "EncodeError": "errors",
    "Lane": "core.lane",
    "Ledger": "run.loader.ledger",
    "OnlinePacker": "stages.packing.packer",
    "Pipeline": "stages.pipeline_value",
    "Ranks": "run.loader.ranks",
    "RayWorkers": "run.nodes.ray_workers",
    "Rng": "core.rng",
    "Sample": "data.dataset.sample",
    "SavableError": "errors",
    "SavableLoader": "run.loader.savable_loader",
    "Schedule": "stages.blending.schedule",
    "ShardError": "errors",
    "ShardWriter": "tools.convert.shard_writer",
    "ShuffleBuffer": "stages.shuffle_buffer",
    "Skip": "stages.task_encoder",
    "SocketWorkers": "run.nodes.socket_workers",
    "StatefulDataset": "run.loader.stateful_dataset",
    "TarShardReader": "stages.readers.readers",
    "TaskEncoder": "stages.task_encoder",
    "WorkerError": "errors",
    "Workers": "run.engine.worker_settings",
    "attention_cost": "stages.cost",
    "blend": "stages.pipeline_starts",
    "convert": "tools.convert.conversion",
    "empty": "core.batch_memory",
    "join": "stages.pipeline_starts",
    "merge_states": "run.state.state_dict",
    "mixture": "stages.pipeline_starts",
    "open_dataset": "data.dataset.opening",
    "read": "stages.pipeline_starts",
    "stack": "core.batch_memory",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public name at its first use."""
    if name not in _PLACES:
        places = ("custom", "errors") if name[:1].isupper() else ()
        found_in = [each for each in places if hasattr(importlib.import_module(f"{__name__}.{each}"), name)]
        meant = get_close_matches(name, _PLACES, 1)
        hint = "".join(f" It is in {__name__}.{each}." for each in found_in) or (
            f" Did you mean {meant[0]}?" if meant else ""
        )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}")
    found = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})

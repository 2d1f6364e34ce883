"""Small datasets as Energon prepares them, and what both libraries make of one."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron import energon
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.rng import SystemRng
from PIL import Image

import savable_pipeline as sp
import savable_pipeline.trainers.energon.encoder  # first: it would keep the `seeder` of `by_both`
from savable_pipeline import energon as ours
from savable_pipeline.core import global_rng
from savable_pipeline.trainers.energon import methods

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\nsubflavors: {kind: plain}\n"


def png(number: int, size: tuple[int, int] = (6, 4)) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def text_of(number: int) -> str:
    return "".join(chr(97 + (number * 7 + i) % 26) for i in range(number * 5 % 17 + 1))


def write(
    root: Path,
    count: int,
    parts: Callable[[int], dict[str, Any]],
    yaml: str = CRUDE,
    *,
    shard: int = 10,
    key: str = "s{:03d}",
) -> Path:
    """A dataset with all samples in the split "train" and "val"; keys are `s000`, `s001`, …"""
    with sp.ShardWriter(root, max_samples=shard) as writer:
        for number in range(count):
            writer.write({"__key__": key.format(number), **parts(number)})
    (root / ".nv-meta/dataset.yaml").write_text(yaml)
    shards = ", ".join(sorted(path.name for path in root.glob("*.tar")))
    (root / ".nv-meta/split.yaml").write_text(f"split_parts: {{train: [{shards}]}}\n")
    return root


def texts(root: Path, count: int = 40, yaml: str = CRUDE) -> Path:
    return write(root, count, lambda i: {"json": {"id": i, "text": text_of(i)}, "txt": f"caption {i}"}, yaml)


def prepared_by_energon(root: Path) -> Path:
    """With the index of keys that Energon needs for auxiliary datasets and joins."""
    names = sorted(path.name for path in root.glob("*.tar"))
    settings: dict[str, Any] = {"split_parts_ratio": [("train", 1.0)], "workers": 1}
    WebdatasetPreparator.prepare_dataset(EPath(str(root)), names, tar_index_only=True, **settings)
    return root


def config(workers: int = 0, rank: int = 0, world_size: int = 1) -> Any:
    return energon.WorkerConfig(rank=rank, world_size=world_size, num_workers=workers)


ONE_PASS = {"shuffle_buffer_size": None, "max_samples_per_sequence": None, "repeat": False}


def by_both(path: Path, make: Callable[[], Any], monkeypatch: Any, **settings: Any) -> tuple[list[Any], list[Any]]:
    """The batches of one pass of each, in the order of their keys, with every random generator seeded alike."""
    monkeypatch.setattr(SystemRng, "seed_args", staticmethod(lambda *_: SystemRng.seed(7)))
    # not to outlive the test
    monkeypatch.setattr(global_rng, "_start_states", cache(global_rng._start_states.__wrapped__))
    for module in (methods, global_rng):
        monkeypatch.setattr(module, "seeder", lambda setting: lambda key: SystemRng.seed(7))
    trust = {"trust": True} if settings.pop("trust", False) else {}
    settings = {"batch_size": 1, **ONE_PASS, **settings, "worker_config": config()}
    dataset = energon.get_train_dataset(str(path), task_encoder=make(), **settings)
    theirs = energon.get_savable_loader(dataset, cache_pool=energon.NoCachePool())
    mine = ours.get_loader(ours.get_train_dataset(str(path), task_encoder=make(), lanes=1, **settings, **trust))
    return ordered(theirs), ordered(mine)


def ordered(batches: Any) -> list[Any]:
    return sorted((plain(batch) for batch in batches), key=repr)


def plain(value: Any) -> Any:
    """A value that can be compared, without the paths by which a sample is restored."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), list(value.shape), value.reshape(-1).tolist()]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), value.tolist()]
    if isinstance(value, Image.Image):
        return ["image", value.mode, value.size, value.tobytes()]
    if isinstance(value, energon.SourceInfo):
        return [str(value.dataset_path), value.shard_name, list(value.file_names)]
    if dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in sorted(value.items()) if name != "__restore_key__"}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value

"""Compare Energon's loader with ours on the same Energon `TaskEncoder`, each in its own process, without workers.

    python tools/bench/energon.py [--samples 4000]

The data sets are texts in JSON, the same texts packed by `select_samples_to_pack`, and cropped JPEGs of 320 × 240
pixels. Each encoder draws random numbers, so it declares `restore_seeds=True`.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import jpeg_of
from megatron import energon
from PIL import Image
from rounds import Bench, Loader, main

import savable_pipeline as sp
from savable_pipeline import energon as ours

BATCH = 32
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
CAPTIONS = (
    "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map: {image: jpg, caption: txt}\n"
)


@energon.stateless
def cook(sample: dict[str, Any]) -> Any:
    """Return a sample with the text of the JSON."""
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["json"]["text"])


class Texts(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Encoder of texts as bytes, one of which is masked at random."""

    cookers = (energon.Cooker(cook),)

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        tokens = list(sample.text.encode())
        tokens[random.randrange(len(tokens))] = 0
        return {"__restore_key__": sample.__restore_key__, "tokens": tokens}

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return [sample["tokens"] for sample in samples]


class Packed(Texts):
    """Encoder of packs of up to 4,096 tokens, filled in random order."""

    @energon.stateless(restore_seeds=True)
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        random.shuffle(samples)
        packs: list[list[Any]] = [[]]
        for sample in samples:
            if sum(len(each["tokens"]) for each in packs[-1]) + len(sample["tokens"]) > 4096:
                packs.append([])
            packs[-1].append(sample)
        return packs

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {**samples[0], "tokens": [token for sample in samples for token in sample["tokens"]]}


class Crops(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Encoder of random crops of 224 × 224 pixels."""

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        top, left = np.random.randint(16), np.random.randint(96)
        pixels = sample.image[:, top : top + 224, left : left + 224]
        return {"__restore_key__": sample.__restore_key__, "pixels": pixels}

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return torch.stack([sample["pixels"] for sample in samples])


def write(folder: Path, samples: int) -> None:
    """Write one dataset of texts and one of images."""
    rng = random.Random(1)
    pixels = np.random.default_rng(1).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    jpeg = jpeg_of(Image.fromarray(pixels).resize((320, 240)), 75)
    for name, (count, yaml) in {"texts": (samples, CRUDE), "images": (samples // 4, CAPTIONS)}.items():
        with sp.ShardWriter(folder / name, max_samples=1000) as writer:
            for number in range(count):
                text = "".join(rng.choices("abcdefgh ", k=rng.randint(100, 400)))
                parts: dict[str, Any] = {"json": {"id": number, "text": text}}
                if name == "images":
                    parts = {"jpg": jpeg, "txt": text}
                writer.write({"__key__": f"{number:06d}", **parts})
        (folder / name / ".nv-meta/dataset.yaml").write_text(yaml)


def batches(library: Any, path: Path, encoder: Any, **settings: Any) -> Iterator[Any]:
    """Return batches of a loader. `library` is `megatron.energon` or our module of that name."""
    settings |= {"shuffle_buffer_size": 100, "max_samples_per_sequence": 100, "task_encoder": encoder}
    settings |= {"lanes": 4} if library is ours else {}
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    data = library.get_train_dataset(str(path), worker_config=config, **settings)
    return iter(library.get_savable_loader(data))


def compare(bench: Bench) -> None:
    """Compare both loaders on each kind of data."""
    logging.disable(logging.WARNING)
    kinds: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "texts": ("texts", Texts(), {"batch_size": BATCH}),
        "texts, packed": ("texts", Packed(), {"batch_size": 1, "packing_buffer_size": 64}),
        "images": ("images", Crops(), {"batch_size": BATCH}),
    }
    with tempfile.TemporaryDirectory(dir=bench.data) as folder:
        write(Path(folder), bench.options.samples)
        for name, (data, encoder, settings) in kinds.items():
            libraries = {"savable_pipeline": ours, "Energon": energon}
            makers = {
                library: lambda each=each: Loader(batches(each, Path(folder) / data, encoder, **settings), lambda _: 1)  # noqa: B023
                for library, each in libraries.items()
            }
            bench.loaders(name, "batch", makers)


if __name__ == "__main__":
    main(__doc__, {"all": compare}, samples=4_000)

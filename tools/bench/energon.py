"""Measures one Energon `TaskEncoder` in Energon's own loader and in ours: processor time, in one process.

    python tools/bench/energon.py [--samples 4000] [--pairs 5]

Texts in JSON, cooked; the same texts, packed by `select_samples_to_pack`; images, 320 × 240 pixels as JPEG, cropped.
Each encoder draws random numbers, so that it says `restore_seeds=True`. The two take turns; each pair gives a ratio.
"""

# mypy: disable-error-code="untyped-decorator"
from __future__ import annotations

import argparse
import io
import itertools
import logging
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron import energon
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import energon as ours

BATCH = 32
CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
CAPTIONS = (
    "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map: {image: jpg, caption: txt}\n"
)


@energon.stateless
def cook(sample: dict[str, Any]) -> Any:
    """The text of the JSON."""
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["json"]["text"])


class Texts(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """The bytes of a text, one of them masked at random."""

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
    """Texts packed as they come, up to 4,096 tokens."""

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
    """A random crop of 224 × 224 pixels."""

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        top, left = np.random.randint(16), np.random.randint(96)
        return {
            "__restore_key__": sample.__restore_key__,
            "pixels": sample.image[:, top : top + 224, left : left + 224],
        }

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return torch.stack([sample["pixels"] for sample in samples])


def write(folder: Path, samples: int) -> dict[str, Path]:
    """The datasets: of texts and of images."""
    draw = random.Random(1)
    pixels = np.random.default_rng(1).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((320, 240)).save(buffer, "jpeg")
    kinds = {"texts": (samples, CRUDE), "images": (samples // 4, CAPTIONS)}
    for name, (count, yaml) in kinds.items():
        with sp.ShardWriter(folder / name, max_samples=1000) as writer:
            for number in range(count):
                text = "".join(draw.choices("abcdefgh ", k=draw.randint(100, 400)))
                parts: dict[str, Any] = {"json": {"id": number, "text": text}}
                if name == "images":
                    parts = {"jpg": buffer.getvalue(), "txt": text}
                writer.write({"__key__": f"{number:06d}", **parts})
        (folder / name / ".nv-meta/dataset.yaml").write_text(yaml)
    return {name: folder / name for name in kinds}


def seconds(library: Any, path: Path, encoder: Any, batches: int, **settings: Any) -> float:
    """Processor time of some batches, after the first ones."""
    config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
    shuffling = {"shuffle_buffer_size": 100, "max_samples_per_sequence": 100}
    own = {"lanes": 4} if library is ours else {}
    data = library.get_train_dataset(
        str(path), worker_config=config, task_encoder=encoder, **shuffling, **settings, **own
    )
    given = iter(library.get_savable_loader(data))
    for _ in itertools.islice(given, 4):
        pass
    begun = time.process_time()
    for _ in itertools.islice(given, batches):
        pass
    return time.process_time() - begun


def main() -> None:
    """Print a line for each kind of data."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = write(Path(folder), given.samples)
        kinds: dict[str, tuple[Path, Any, int, dict[str, Any]]] = {
            "texts": (paths["texts"], Texts(), given.samples // BATCH, {"batch_size": BATCH}),
            "texts, packed": (
                paths["texts"],
                Packed(),
                given.samples // 16,
                {"batch_size": 1, "packing_buffer_size": 64},
            ),
            "images": (paths["images"], Crops(), given.samples // 4 // BATCH, {"batch_size": BATCH}),
        }
        for name, (path, encoder, batches, settings) in kinds.items():
            pairs = [
                (
                    seconds(energon, path, encoder, batches, **settings),
                    seconds(ours, path, encoder, batches, **settings),
                )
                for _ in range(given.pairs)
            ]
            ratios = sorted(theirs / mine for theirs, mine in pairs)
            mine, theirs = (statistics.median(pair[i] for pair in pairs) / batches * 1e3 for i in (1, 0))
            print(
                f"{name}: Energon {theirs:.2f} ms a batch, here {mine:.2f} ms; rate {statistics.median(ratios):.2f} "
                f"times Energon's ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main()

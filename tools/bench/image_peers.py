"""The same images by each loader with two workers: random crops of 224 × 224, and whole images, as stacks of uint8.

Each loader runs in a process of its own, in turn, and its processor time is taken from full queues to full queues, so
that nothing is counted that is made for another. What is not the same work:

    spdl                  crops, scales (bilinear, with antialias) and mirrors in FFmpeg, whose pixels are others; NHWC
    DALI                  decodes the crop alone, scales (linear, with antialias); NHWC
    torch DataLoader      has the files in memory already, which no loader of tars can
    webdataset            reads the tars through; the others but torch's draw samples from all of them
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
import torch
from apart import Maker, in_turn
from data import FOLDER, prepared
from PIL import Image
from pipelines import FunctionEncoder, pipeline
from rounds import Loader
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import savable_pipeline as sp
from task_encoders import SquareCrop
from task_encoders.parts.random_box import random_box

WORKERS, SIDE, SCALE = 2, 224, (0.08, 1.0)

_crop = v2.Compose([v2.RandomResizedCrop(SIDE, SCALE, antialias=True), v2.RandomHorizontalFlip()])


class Crops(sp.TaskEncoder):
    """Random crops as our encoders make them."""

    global_rng = False

    def __init__(self, decode: Literal["scaled", "exact"]) -> None:
        self._crop = SquareCrop(SIDE, scale=SCALE, decode=decode)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        """uint8 (3, 224, 224)."""
        return self._crop.image(sample, rng)


def peers_of_images(only: str = "") -> dict[str, Any]:
    """All cells, or those whose title has `only` in it."""
    small, large = (prepared(FOLDER, name) for name in ("photos", "large-photos"))
    cells = {  # what each takes, in batches of how many, and how many batches of them
        "crops of 500 × 375": (crops, small, 32, 12),
        "crops of 4000 × 3000": (crops, large, 2, 8),
        "whole 500 × 375": (whole, small, 16, 24),
        "whole 4000 × 3000": (whole, large, 2, 5),
    }
    chosen = {title: cell for title, cell in cells.items() if only in title}
    return {title: in_turn(title, "images", make(at, size), count) for title, (make, at, size, count) in chosen.items()}


def crops(folder: Path, size: int) -> dict[str, Maker]:
    """Loaders of random crops, mirrored half the time."""
    jpegs = records(folder)

    def in_memory(decode: Callable[[Any], Any]) -> Maker:
        return lambda: Loader(peers.in_memory(jpegs, decode, default_collate, size=size, workers=WORKERS), len)

    return {
        'savable_pipeline, decode="scaled"': lambda: ours(folder, Crops("scaled"), size),
        'savable_pipeline, decode="exact"': lambda: ours(folder, Crops("exact"), size),
        "torch DataLoader, torchvision's decoder and tensors": in_memory(lambda it: _crop(by_torchvision(it))),
        "torch DataLoader, Pillow": in_memory(cropped),
        "webdataset, Pillow": lambda: webdataset(folder, cropped, size),
        "spdl, its decoder, two threads": lambda: spdl(folder, spdl_crop, size),
        "DALI on the processor, two threads": lambda: dali(folder, size, crop=True),
    }  # fmt: skip


def whole(folder: Path, size: int) -> dict[str, Maker]:
    """Loaders of whole images."""
    jpegs = records(folder)

    def in_memory(decode: Callable[[Any], Any]) -> Maker:
        return lambda: Loader(peers.in_memory(jpegs, decode, default_collate, size=size, workers=WORKERS), len)

    return {
        "savable_pipeline, `sample.decoded()` with `fast`": lambda: ours(folder, FunctionEncoder(decoded, None), size),
        "savable_pipeline, `sample.image()`": lambda: ours(folder, FunctionEncoder(own_image, None), size),
        "torch DataLoader, torchvision's decoder": in_memory(by_torchvision),
        "torch DataLoader, Pillow": in_memory(lambda it: functional.pil_to_tensor(by_pillow(it))),
        "webdataset, Pillow": lambda: webdataset(folder, lambda it: np.array(by_pillow(it)), size),
        "spdl, its decoder, two threads": lambda: spdl(folder, spdl_whole, size),
        "DALI on the processor, two threads": lambda: dali(folder, size, crop=False),
    }


def records(folder: Path) -> list[dict[str, bytes]]:
    """The different files of a folder of tars, in memory."""
    data = sp.TarShardReader(str(folder), sp.Lane(), shuffle=False)
    return list({raw: {"jpg": raw} for raw in (sample["jpg"] for sample in itertools.islice(data, 64))}.values())


def by_pillow(sample: Mapping[str, bytes]) -> Image.Image:
    return Image.open(BytesIO(sample["jpg"])).convert("RGB")


def cropped(sample: Mapping[str, bytes]) -> torch.Tensor:
    tensor: torch.Tensor = functional.pil_to_tensor(_crop(by_pillow(sample)))
    return tensor


def by_torchvision(sample: Mapping[str, bytes]) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(sample["jpg"]), dtype=torch.uint8)
    pixels: torch.Tensor = decode_jpeg(raw, ImageReadMode.RGB)
    return pixels


def decoded(sample: Any) -> torch.Tensor:
    return torch.from_numpy(sample.decoded()["jpg"])


def own_image(sample: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(sample.image("jpg")))


def ours(folder: Path, encoder: sp.TaskEncoder, size: int) -> Loader:
    loader = sp.SavableLoader(lambda lane: pipeline(str(folder), encoder, size, 0, lane), seed=1, num_workers=WORKERS)
    return Loader(iter(loader), len, loader.close)


def webdataset(folder: Path, decode: Callable[[Any], Any], size: int) -> Loader:
    return Loader(peers.web_dataset(folder, decode, default_collate, size=size, buffer=0, workers=WORKERS), len)


def spdl(folder: Path, decode: Callable[[Any], Any], size: int) -> Loader:
    import spdl.io as io

    def collate(frames: list[Any]) -> Any:
        return io.to_torch(io.convert_frames(frames))

    pool = peers.Threads(folder, "jpg", decode, collate, size=size, threads=WORKERS)
    return Loader(iter(pool), len, pool.close)


_numbers = itertools.count()


def spdl_crop(sample: Mapping[str, bytes]) -> Any:
    import spdl.io as io

    packets, rng = io.demux_image(sample["jpg"]), sp.Rng(next(_numbers))
    left, upper, right, lower = random_box((packets.width, packets.height), SCALE, rng)
    flip = "hflip," if rng.random() < 0.5 else ""
    cut = f"crop={right - left}:{lower - upper}:{left}:{upper}:exact=1,scale={SIDE}:{SIDE}:flags=bilinear"
    return io.decode_packets(packets, filter_desc=f"{cut},{flip}format=rgb24")


def spdl_whole(sample: Mapping[str, bytes]) -> Any:
    import spdl.io as io

    return io.decode_packets(io.demux_image(sample["jpg"]), filter_desc="format=rgb24")


def dali(folder: Path, size: int, *, crop: bool) -> Loader:
    from nvidia.dali import fn, types
    from nvidia.dali.pipeline import Pipeline

    pipe = Pipeline(batch_size=size, num_threads=WORKERS, device_id=None, seed=1)
    with pipe:
        shards = sorted(str(path) for path in folder.glob("*.tar"))
        jpegs = fn.readers.webdataset(paths=shards, ext=["jpg"], random_shuffle=True, initial_fill=64)
        if crop:
            aspects = [3 / 4, 4 / 3]
            cut = fn.decoders.image_random_crop(jpegs, random_area=SCALE, random_aspect_ratio=aspects)
            sized = fn.resize(cut, size=[SIDE, SIDE], interp_type=types.INTERP_LINEAR, antialias=True)
            pipe.set_outputs(fn.flip(sized, horizontal=fn.random.coin_flip()))
        else:
            pipe.set_outputs(fn.decoders.image(jpegs))
    pipe.build()
    return Loader((torch.utils.dlpack.from_dlpack(pipe.run()[0].as_tensor()) for _ in itertools.count()), len)

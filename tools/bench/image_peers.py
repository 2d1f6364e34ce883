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
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
import torch
from data import FOLDER, console, prepared
from PIL import Image
from pipelines import FunctionEncoder, pipeline
from rich.table import Table
from rounds import Loader, processor_s, spread
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

import savable_pipeline as sp
from task_encoders import SquareCrop
from task_encoders.parts.random_box import random_box

ROUNDS, WORKERS, SIDE, SCALE = 5, 2, 224, (0.08, 1.0)
WARM, CALM_S, CALM = 2, 0.2, 0.015  # batches first; at rest is who uses so few processor seconds in this time, twice
Maker = Callable[[], Loader]

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
    return {title: _in_turn(title, make(at, size), count) for title, (make, at, size, count) in chosen.items()}


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


def _in_turn(title: str, makers: dict[str, Maker], batches: int) -> dict[str, Any]:
    """Rates and processor times, and their ratios to the first: medians, and the spread of rounds."""
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for _ in range(ROUNDS):
        for name in list(rounds):
            told = _apart(makers[name], batches)
            if isinstance(told, str):
                console.print(f"{name} is left out: {told}")
                del rounds[name]
            else:
                rounds[name].append(told)
                console.print(f"{title}, {name}: {told[0]:.1f} images/s, {told[1]:.2f} ms of processor time")
    first = next(iter(rounds.values()))
    table = Table(title, "images/s", "the first / it", "spread", "processor ms", "it / the first", "spread")
    result = {}
    for name, found in rounds.items():
        rates = spread([own / its for (own, _), (its, _) in zip(first, found, strict=True)])
        costs = spread([its / own for (_, own), (_, its) in zip(first, found, strict=True)])
        rate, cost = (statistics.median(column) for column in zip(*found, strict=True))
        result[name] = {"images/s": rate, "first/it": rates, "ms": cost, "ms it/first": costs}
        cells = [cell for low, middle, high in (rates, costs) for cell in (f"{middle:.2f}", f"{low:.2f} to {high:.2f}")]
        table.add_row(name, f"{rate:,.1f}", *cells[:2], f"{cost:.2f}", *cells[2:])
    console.print(table)
    return result


def _apart(make: Maker, batches: int) -> tuple[float, float] | str:
    """Images a second and the processor's milliseconds an image, in a process of its own; or why it cannot run."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(make, batches, sender))
    process.start()
    sender.close()
    told: tuple[float, float] | str = receiver.recv()
    process.join()
    return told


def _measured(make: Maker, batches: int, sender: Any) -> None:
    torch.set_num_threads(1)
    try:
        loader = make()
    except (ImportError, RuntimeError) as error:
        sender.send(f"{error}".splitlines()[0][:200])
        return
    for _ in range(WARM):
        next(loader.batches)
    before, _ = _at_rest()
    start = time.perf_counter()
    images = sum(loader.use(next(loader.batches)) for _ in range(batches))
    after, end = _at_rest()
    sender.send((images / (end - start), (after - before) / images * 1e3))
    loader.close()


def _at_rest() -> tuple[float, float]:
    """Processor seconds, once all queues are full, and when they became so."""
    calm, last, since = 0, processor_s(os.getpid()), time.perf_counter()
    while calm < 2:
        time.sleep(CALM_S)
        now = processor_s(os.getpid())
        calm = calm + 1 if now - last <= CALM else 0
        last, since = now, since if calm else time.perf_counter()
    return last, since

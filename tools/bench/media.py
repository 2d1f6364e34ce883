"""Measure the CPU time of images and clips, and compare other decoders and loaders.

    python tools/bench/media.py scaled     random crops and tiles of JPEGs, decode="scaled" against "exact"
    python tools/bench/media.py quality    PSNR of scaled against exact crops; the accuracy of a small model on each
    python tools/bench/media.py arrays     whole JPEGs as arrays by simplejpeg (the extra `fast`) against Pillow
    python tools/bench/media.py peers      crops and whole images with two workers; other loaders (spdl needs FFmpeg)
    python tools/bench/media.py clips --pythons Energon=VENV/bin/python torchcodec=VENV/bin/python

`clips` draws clips of 2 s with 8 frames per second, resized to 224 × 224, from a tar of 60 videos of 20 s (640 × 360,
H.264). The other decoders read the same files from the page cache (PyAV) or from memory (Energon, torchcodec), and pass
no clip to another process.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peers
import sklearn
import torch
from data import digits_in_scenes, jpeg_of, prepare, records_of, sample_of, scene
from ours import FunctionEncoder, loader
from peers import DECODERS, FPS, LENGTH_S, SCALE, SIDE
from rounds import Bench, Loader, called, console, main, spread
from torch.utils.data import default_collate

import savable_pipeline as sp
from savable_pipeline import custom
from task_encoders import NativeSize, SquareCrop, Tiles, Vision
from task_encoders.parts.square_crop import random_box

WORKERS = 2
CALLS = {(4000, 3000): 3, (500, 375): 60}  # calls per round, by width and height of the image
Decoding = Literal["scaled", "exact"]
Call = Callable[[sp.Sample, int], Any]


def scaled(bench: Bench) -> None:
    """Compare decoding at the needed size with decoding in full, for crops and tiles."""
    makers: dict[str, Callable[[Decoding], Call]] = {
        "a crop of half of the image or more": partial(crops, (0.5, 1.0)),
        "a crop of 8 % or more": partial(crops, (0.08, 1.0)),
        "its central square": central,
        "NativeSize": partial(tiled, NativeSize()),
        "Tiles": partial(tiled, Tiles()),
    }
    for (width, height), calls in CALLS.items():
        images = [sample_of(jpeg_of(scene(width, height, seed))) for seed in range(2)]
        for name, make in makers.items():
            ways = {"scaled": make("scaled"), "exact": make("exact")}
            if "crop" in name:
                ways["torchvision's crop"] = by_torchvision((0.5, 1.0) if "half" in name else (0.08, 1.0))
            count = calls if "crop" in name else 1 + calls // 20
            timed = {way: called(partial(call_in_turn, call, images, count), count) for way, call in ways.items()}
            bench.compare(f"{width} × {height}, {name}", "image", timed)


def arrays(bench: Bench) -> None:
    """Compare simplejpeg with Pillow for whole JPEGs. The pixels must be equal."""
    ways: dict[str, Call] = {
        "simplejpeg": lambda sample, _: sample.decoded()["jpg"],
        "Pillow": lambda sample, _: np.array(sample.image("jpg")),
    }
    for ((width, height), calls), subsampling in itertools.product(CALLS.items(), ("4:4:4", "4:2:0")):
        image = sample_of(jpeg_of(scene(width, height, 0), subsampling=subsampling))
        assert np.array_equal(*(way(image, 0) for way in ways.values()))
        timed = {name: called(partial(call_in_turn, way, [image], calls), calls) for name, way in ways.items()}
        bench.compare(f"whole JPEG, {width} × {height}, {subsampling}", "image", timed)


def call_in_turn(call: Call, images: list[sp.Sample], count: int) -> None:
    """Call `count` times, cycling through the images."""
    for number in range(count):
        call(images[number % len(images)], number)


def crops(scale: tuple[float, float], decode: Decoding) -> Call:
    """Return a function that makes a random crop of 224 × 224 pixels."""
    crop = SquareCrop(scale=scale, decode=decode)
    return lambda sample, number: crop.image(sample, sp.Rng(number))


def by_torchvision(scale: tuple[float, float]) -> Call:
    """Return a function that makes such a crop with torchvision."""
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(224, scale=scale), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def call(sample: sp.Sample, number: int) -> Any:
        torch.manual_seed(number)
        return crop(sample.image("jpg"))

    return call


def central(decode: Decoding) -> Call:
    """Return a function that resizes the central square to 224 × 224 pixels."""
    crop = SquareCrop(augment=False, decode=decode)
    return lambda sample, number: crop.image(sample, sp.Rng(number))


def tiled(tiles: Any, decode: Decoding) -> Call:
    """Return a function that splits an image into the patches of a vision model."""
    vision = Vision(tiles, token=1, decode=decode)
    return lambda sample, number: vision.tiles.cut(vision.image(sample, "jpg"))


def quality(bench: Bench) -> None:
    """Compare the pixels of scaled and exact decoding, and the accuracy of models trained on them."""
    folder = Path(sklearn.__file__).parent / "datasets" / "images"  # two photographs, 640 × 427 pixels
    for path, size in itertools.product(sorted(folder.glob("*.jpg")), (128, 64, 32)):
        decibels, scales = psnr(sample_of(path.read_bytes()), size)
        sizes = ", ".join(f"1/{scale}" for scale in sorted(scales))
        mean, least = statistics.mean(decibels), min(decibels)
        console.print(f"{path.stem}, {size} × {size} from {sizes}: PSNR {mean:.1f} dB, {least:.1f}")
    accuracy()


def psnr(sample: sp.Sample, size: int) -> tuple[list[float], set[int]]:
    """Compare scaled with exact decoding of 200 random crops.

    Args:
        sample: A sample with a JPEG.
        size: Width and height of the crops, in pixels.

    Returns:
        The PSNR of each crop that differs, and the denominators of the sizes at which the JPEG was decoded for them.
    """
    ratios, scales = [], set()
    for number in range(200):
        pixels = [
            SquareCrop(size, flip=0, decode=decode).image(sample, sp.Rng(number)).float()  # type: ignore[union-attr]
            for decode in ("scaled", "exact")
        ]
        error = ((pixels[0] - pixels[1]) ** 2).mean().item()
        if error:
            ratios.append(10 * np.log10(255**2 / error))
            scales.add(scale_of(sample, size, number))
    return ratios, scales


def scale_of(sample: sp.Sample, size: int, number: int) -> int:
    """Return the denominator of the size at which a JPEG is decoded for a crop: 1, 2, 4 or 8."""
    boxes = []  # the box of the crop in the full image, once it is drawn

    def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
        boxes.append(random_box((width, height), (0.5, 1.0), sp.Rng(number)))
        return boxes[0]

    left, _, right, _ = sample.image(at_least=(size, size), box=draw_box).info["box"]
    return int((boxes[0][2] - boxes[0][0]) / (right - left) + 0.5)


def accuracy(epochs: int = 5, seeds: int = 3, count: int = 1_437) -> None:
    """Train a small model on scaled and on exact crops of digits, test both on both, and print the accuracy."""
    torch.set_num_threads(1)
    digits = [(sample_of(jpeg), label) for jpeg, label in digits_in_scenes(320, 240)]
    training, testing = digits[:count], digits[count:]
    labels = torch.tensor([label for _, label in testing])
    tests = {kind: crop_digits(testing, kind, None) for kind in ("exact", "scaled")}
    for kind in tests:
        images_by_epoch = [crop_digits(training, kind, epoch) for epoch in range(epochs)]
        training_labels = torch.tensor([label for _, label in training])
        models = [train_model(images_by_epoch, training_labels, seed) for seed in range(seeds)]
        for other, images in tests.items():
            percents = [100 * (model(images).argmax(1) == labels).float().mean().item() for model in models]
            console.print(f"trained on {kind} crops, tested on {other} ones: {spread(percents)} % of {seeds} seeds")


def crop_digits(digits: list[tuple[sp.Sample, int]], kind: Any, epoch: int | None) -> torch.Tensor:
    """Crop digits at random as in this epoch, or centrally if it is None: float32 (n, 3, 28, 28)."""
    crop = SquareCrop(28, augment=epoch is not None, scale=(0.8, 1.0), flip=0.0, decode=kind)
    images = [crop.image(sample, sp.Rng(i, (epoch or 0, 0, 0))) for i, (sample, _) in enumerate(digits)]
    return crop.normalize(torch.stack(images))  # type: ignore[arg-type]


def train_model(epochs: list[torch.Tensor], labels: torch.Tensor, seed: int) -> torch.nn.Module:
    """Train a network of three convolutions, initialized by `seed`.

    `epochs` has the images of each epoch.
    """
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 24), (24, 48), (48, 96)):
        layers += [torch.nn.Conv2d(before, after, 3, padding=1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
        layers += [torch.nn.MaxPool2d(2)]
    model = torch.nn.Sequential(*layers, torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten(), torch.nn.Linear(96, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = len(epochs) * (len(labels) // 64 + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for images in epochs:
        for rows in torch.randperm(len(labels)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return model.eval()


def compare_loaders(bench: Bench) -> None:
    """Compare loaders with two workers, on random crops and on whole images, as batches of uint8."""
    for width, name, crop_batch, whole_batch in ((500, "photos", 32, 16), (4000, "large-photos", 2, 2)):
        folder = prepare(bench.data, name)
        title = f"of {width} × {width * 3 // 4}"
        bench.loaders(f"crops {title}", "image", crop_loaders(folder, crop_batch))
        bench.loaders(f"whole images {title}", "image", whole_loaders(folder, whole_batch))


class Crops(sp.TaskEncoder):
    """Encoder of random crops by `SquareCrop`."""

    def __init__(self, decode: Decoding) -> None:
        self._crop = SquareCrop(SIDE, scale=SCALE, decode=decode)

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        """Return a random crop: uint8 (3, 224, 224)."""
        return self._crop.image(sample, rng)


def crop_loaders(folder: Path, size: int) -> dict[str, Callable[[], Loader]]:
    """Return functions that open each loader, for batches of `size` random crops."""
    return {
        'savable_pipeline, decode="scaled"': lambda: loader(folder, Crops("scaled"), size=size, workers=WORKERS),
        'savable_pipeline, decode="exact"': lambda: loader(folder, Crops("exact"), size=size, workers=WORKERS),
        "torch DataLoader, torchvision": lambda: in_memory(folder, peers.crop_by_torchvision, size),
        "torch DataLoader, Pillow": lambda: in_memory(folder, peers.crop_by_pillow, size),
        "webdataset, Pillow": lambda: web_dataset(folder, peers.crop_by_pillow, size),
        "spdl, two threads": lambda: spdl(folder, random_crop(), size),
        "DALI, two threads": lambda: Loader(peers.dali(folder, size, crop=True, threads=WORKERS)),
    }


def whole_loaders(folder: Path, size: int) -> dict[str, Callable[[], Loader]]:
    """Return functions that open each loader, for batches of `size` whole images."""
    decoded = FunctionEncoder(lambda sample: torch.from_numpy(sample.decoded()["jpg"]))  # type: ignore[attr-defined]
    image = FunctionEncoder(lambda sample: torch.from_numpy(np.array(sample.image("jpg"))))  # type: ignore[attr-defined]
    return {
        "savable_pipeline, `sample.decoded()` with `fast`": lambda: loader(folder, decoded, size=size, workers=WORKERS),
        "savable_pipeline, `sample.image()`": lambda: loader(folder, image, size=size, workers=WORKERS),
        "torch DataLoader, torchvision": lambda: in_memory(folder, peers.by_torchvision, size),
        "torch DataLoader, Pillow": lambda: in_memory(folder, peers.whole_by_pillow, size),
        "webdataset, Pillow": lambda: web_dataset(folder, peers.whole_by_pillow, size),
        "spdl, two threads": lambda: spdl(folder, lambda packets: "", size),  # without a filter of FFmpeg
        "DALI, two threads": lambda: Loader(peers.dali(folder, size, crop=False, threads=WORKERS)),
    }


def in_memory(folder: Path, decode: Callable[[Mapping[str, bytes]], Any], size: int) -> Loader:
    """Open torch's DataLoader over files in memory: an upper bound for loaders that read tars."""
    records = records_of(folder, 64)
    return Loader(peers.torch_loader(records, decode, default_collate, size=size, num_workers=WORKERS))


def web_dataset(folder: Path, decode: Callable[[Mapping[str, bytes]], Any], size: int) -> Loader:
    """Open webdataset, which reads the tars sequentially."""
    return Loader(peers.web_dataset(folder, decode, default_collate, size=size, num_workers=WORKERS))


def spdl(folder: Path, filters: Callable[[Any], str], size: int) -> Loader:
    """Open spdl with its own decoder."""
    decode, collate = peers.spdl_frames(filters)
    pool = peers.spdl_threads(folder, "jpg", decode, collate, size=size, threads=WORKERS)
    return Loader(iter(pool), len, pool.stop)


def random_crop() -> Callable[[Any], str]:
    """Return a function that draws a crop as an FFmpeg filter string, bilinear with antialias."""
    numbers = itertools.count()

    def filters(packets: Any) -> str:
        rng = sp.Rng(next(numbers))
        left, upper, right, lower = random_box((packets.width, packets.height), SCALE, rng)
        flip = "hflip," if rng.random() < 0.5 else ""
        return (
            f"crop={right - left}:{lower - upper}:{left}:{upper}:exact=1,scale={SIDE}:{SIDE}:flags=bilinear,{flip}"
        )  # fmt: skip

    return filters


def clips(bench: Bench) -> None:
    """Compare our loader with two workers to two processes that only decode."""
    pythons = dict(each.split("=", 1) for each in bench.options.pythons)
    folder = prepare(bench.data, "videos")
    makers: dict[str, Callable[[], Loader]] = {"savable_pipeline": lambda: our_clips(folder, "exact")}
    for name in DECODERS:
        python = pythons.get(name.split(",")[0], sys.executable)
        makers[name] = partial(decoder_processes, python, name, folder / "files")
    makers["savable_pipeline, from keyframes"] = lambda: our_clips(folder, "keyframe")
    bench.loaders("clips of 2 s, two processes", "clip", makers)


class RandomClips(sp.TaskEncoder):
    """Encoder of one random clip of a video: uint8 (16, 3, 224, 224)."""

    def __init__(self, align: Any) -> None:
        self._clips = sp.Clips(length_s=LENGTH_S, fps=FPS, align=align, size=(SIDE, SIDE))

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return self._clips.one(sample.video("mp4"), rng).frames


def our_clips(folder: Path, align: str) -> Loader:
    """Open our loader with batches of four clips. `align` is that of `Clips`."""
    encoder = RandomClips(align)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(str(folder / "000000.tar"), lane), encoder), size=4)

    loader = sp.SavableLoader(pipeline, seed=1, lanes=12, num_workers=WORKERS)
    return Loader(iter(loader), len, loader.close)


def decoder_processes(python: str, decoder: str, folder: Path) -> Loader:
    """Run a decoder in WORKERS processes. Each decodes as many clips at a time as our batches have."""
    command = [python, str(Path(peers.__file__)), "clips", decoder, str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    single_threaded = {**os.environ, "OMP_NUM_THREADS": "1"}
    started: list[Any] = [
        subprocess.Popen([*command, str(seed)], env=single_threaded, **pipes) for seed in range(WORKERS)
    ]

    def end() -> None:
        for program in started:
            program.terminate()
            program.wait()

    def read_answers() -> list[str]:
        return [program.stdout.readline().strip() for program in started]

    def batches() -> Iterator[list[int]]:
        while True:
            for program in started:
                program.stdin.write("4\n")
                program.stdin.flush()
            yield [int(answer) for answer in read_answers()]

    if (found := {*read_answers()}) != {"ready"}:
        end()
        raise ImportError(" ".join(found))
    return Loader(batches(), sum, end)


if __name__ == "__main__":
    measures = {"scaled": scaled, "quality": quality, "arrays": arrays, "peers": compare_loaders, "clips": clips}
    main(__doc__, measures, pythons=[])

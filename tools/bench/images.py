"""Measures what encoders of images cost, by processor time in turns, and how far scaled decoding is from exact.

python tools/bench/images.py            all of it, about two minutes of processor time
python tools/bench/images.py scaled     random crops and tiles of JPEGs, decode="scaled" against "exact"
python tools/bench/images.py quality    PSNR of scaled against exact crops; the accuracy of a small model of each
python tools/bench/images.py arrays     whole JPEGs as arrays by simplejpeg (the extra `fast`) against Pillow
python tools/bench/images.py peers      crops and whole images with two workers; other loaders (spdl needs FFmpeg)
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from data import console
from image_peers import peers_of_images
from photos import digits_in_scenes, jpeg_of, photographs, sample_of, scene
from rich.table import Table
from rounds import spread
from torchvision.transforms import v2

import savable_pipeline as sp
from task_encoders import NativeSize, SquareCrop, Tiles, Vision
from task_encoders.parts.random_box import random_box

ROUNDS, CALLS = 5, {(4000, 3000): 3, (500, 375): 60}  # calls in a round, for images of this size
Call = Callable[[sp.Sample, int], Any]


def scaled() -> dict[str, Any]:
    """How much quicker an image is decoded where no more is made than is needed."""
    makers: dict[str, Callable[[Any], Call]] = {
        "crop, half of the image or more": lambda decode: crops((0.5, 1.0), decode),
        "crop, 8 % or more": lambda decode: crops((0.08, 1.0), decode),
        "central crop": lambda decode: central(decode),
        "NativeSize": lambda decode: tiled(NativeSize(), decode),
        "Tiles": lambda decode: tiled(Tiles(), decode),
    }
    table = Table("JPEG", "to", "exact, ms", "scaled, ms", "exact / scaled", "spread", "torchvision / scaled", "spread")
    found = {}
    for size, calls in CALLS.items():
        images = [sample_of(jpeg_of(scene(*size, seed))) for seed in range(2)]
        for name, make in makers.items():
            ways = {"scaled": make("scaled"), "exact": make("exact")}
            if name.startswith("crop"):
                ways["torchvision"] = by_torchvision((0.5, 1.0) if "half" in name else (0.08, 1.0))
            took = in_turns(ways, images, calls if "crop" in name else 1 + calls // 20)
            pairs = {way: zip(took[way], took["scaled"], strict=True) for way in took}
            ratios = {way: spread([its / own for its, own in both]) for way, both in pairs.items()}
            ms = {way: statistics.median(times) * 1e3 for way, times in took.items()}
            found[f"{size[0]} × {size[1]}, {name}"] = {"ms": ms, "ratios": ratios}
            cells = [cell for way in ("exact", "torchvision") for cell in ratio_cells(ratios.get(way))]
            console.print(f"{size[0]} × {size[1]}, {name}: {ratios['exact']}")
            table.add_row(f"{size[0]} × {size[1]}", name, f"{ms['exact']:.2f}", f"{ms['scaled']:.2f}", *cells)
    console.print(table)
    return found


def arrays() -> dict[str, Any]:
    """How much sooner whole JPEGs are arrays by simplejpeg than by Pillow, and whether the pixels are the same."""
    table = Table(
        "whole JPEG, uint8 (height, width, 3)", "Pillow, ms", "simplejpeg, ms", "Pillow / simplejpeg", "spread"
    )
    found = {}
    for size, calls in CALLS.items():
        drawn = scene(*size, 0)
        for subsampling in ("4:4:4", "4:2:0"):
            images = [sample_of(jpeg_of(drawn, subsampling=subsampling))]
            ways: dict[str, Call] = {
                "simplejpeg": lambda sample, _: sample.decoded()["jpg"],
                "Pillow": lambda sample, _: np.array(sample.image("jpg")),
            }
            assert all(np.array_equal(*(way(image, 0) for way in ways.values())) for image in images)
            took = in_turns(ways, images, calls)
            ratio = spread([its / own for its, own in zip(took["Pillow"], took["simplejpeg"], strict=True)])
            ms = {way: statistics.median(times) * 1e3 for way, times in took.items()}
            name = f"{size[0]} × {size[1]}, {subsampling}"
            found[name] = {"ms": ms, "ratio": ratio}
            table.add_row(name, f"{ms['Pillow']:.2f}", f"{ms['simplejpeg']:.2f}", *ratio_cells(ratio))
    console.print(table)
    return found


def crops(scale: tuple[float, float], decode: Any) -> Call:
    """Random crops of 224 × 224."""
    crop = SquareCrop(scale=scale, decode=decode)
    return lambda sample, number: crop.image(sample, sp.Rng(number))


def by_torchvision(scale: tuple[float, float]) -> Call:
    """The same crops by torchvision."""
    crop = v2.Compose([v2.RandomResizedCrop(224, scale=scale), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def call(sample: sp.Sample, number: int) -> Any:
        torch.manual_seed(number)
        return crop(sample.image("jpg"))

    return call


def central(decode: Any) -> Call:
    """The central square as 224 × 224."""
    crop = SquareCrop(augment=False, decode=decode)
    return lambda sample, number: crop.image(sample, sp.Rng(number))


def tiled(tiles: Any, decode: Any) -> Call:
    """The patches of an image in a conversation."""
    vision = Vision(tiles, token=1, decode=decode)
    return lambda sample, number: vision.tiles.cut(vision.image(sample, "jpg"))


def in_turns(ways: dict[str, Call], images: list[sp.Sample], calls: int) -> dict[str, list[float]]:
    """Processor seconds of a call each round, each image and number by all ways before the next."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for name in ways:
        ways[name](images[0], 0)
    for turn in range(ROUNDS):
        sums = dict.fromkeys(ways, 0.0)
        for number in range(turn * calls, turn * calls + calls):
            for name in list(ways)[:: 1 if number % 2 else -1]:  # who comes first pays for what is not in a cache
                before = time.process_time()
                ways[name](images[number % len(images)], number)
                sums[name] += time.process_time() - before
        for name, total in sums.items():
            took[name].append(total / calls)
    return took


def ratio_cells(ratio: list[float] | None) -> tuple[str, str]:
    return (f"{ratio[1]:.2f}", f"{ratio[0]:.2f} to {ratio[2]:.2f}") if ratio else ("", "")


def quality() -> dict[str, Any]:
    """How far pixels of scaled decoding are from exact ones, and whether a model notices."""
    return {"psnr": psnr(), "accuracy": accuracy()}


def psnr() -> dict[str, Any]:
    """Of random crops of two photographs that are decoded at a half, a quarter and an eighth."""
    table = Table("photograph", "crop", "decoded at", "PSNR, dB", "lowest of 200")
    found = {}
    for name, jpeg in photographs().items():
        sample = sample_of(jpeg)
        for size in (128, 64, 32):
            ratios, scales = [], []
            for number in range(200):
                one, other = (SquareCrop(size, flip=0, decode=decode) for decode in ("scaled", "exact"))
                pixels = [crop.image(sample, sp.Rng(number)) for crop in (one, other)]
                error = ((pixels[0].float() - pixels[1].float()) ** 2).mean().item()  # type: ignore[union-attr]
                if error:
                    ratios.append(10 * np.log10(255**2 / error))
                    scales.append(scale_of(sample, size, number))
            found[f"{name}, {size}"] = {"dB": statistics.mean(ratios), "lowest": min(ratios)}
            at = ", ".join(f"1/{scale}" for scale in sorted({*scales}))
            table.add_row(name, f"{size} × {size}", at, f"{statistics.mean(ratios):.1f}", f"{min(ratios):.1f}")
    console.print(table)
    return found


def scale_of(sample: sp.Sample, size: int, number: int) -> int:
    """At which part of its size an image is decoded for a crop."""
    boxes = []

    def box(width: int, height: int) -> tuple[int, int, int, int]:
        boxes.append(random_box((width, height), (0.5, 1.0), sp.Rng(number)))
        return boxes[0]

    left, _, right, _ = sample.image(at_least=(size, size), box=box).info["box"]
    return int((boxes[0][2] - boxes[0][0]) / (right - left) + 0.5)


EPOCHS, SEEDS, SIDE, TRAINED = 5, 3, 28, 1_437


def accuracy() -> dict[str, Any]:
    """Of a small model trained on crops of each kind, tested on crops of each kind: digits in scenes."""
    torch.set_num_threads(1)
    digits = [(sample_of(jpeg), label) for jpeg, label in digits_in_scenes(320, 240)]
    trained, tested = digits[:TRAINED], digits[TRAINED:]
    labels = torch.tensor([label for _, label in tested])
    found: dict[str, list[float]] = {}
    for kind in ("exact", "scaled"):
        epochs = [cut(trained, kind, epoch) for epoch in range(EPOCHS)]
        tests = {other: cut(tested, other, None) for other in ("exact", "scaled")}
        for seed in range(SEEDS):
            model = fitted(epochs, torch.tensor([label for _, label in trained]), seed)
            console.print(f"trained on {kind} crops, seed {seed}")
            for other, images in tests.items():
                right = (model(images).argmax(1) == labels).float().mean().item()
                found.setdefault(f"trained {kind}, tested {other}", []).append(100 * right)
    table = Table("crops of 28 × 28 from 320 × 240", "accuracy, %", f"spread of {SEEDS} seeds")
    for name, rights in found.items():
        table.add_row(name, f"{statistics.mean(rights):.2f}", f"{min(rights):.2f} to {max(rights):.2f}")
    console.print(table)
    return found


def cut(digits: list[tuple[sp.Sample, int]], kind: Any, epoch: int | None) -> torch.Tensor:
    """The crops of one epoch, or central ones, float32 (n, 3, 28, 28)."""
    crop = SquareCrop(SIDE, augment=epoch is not None, scale=(0.8, 1.0), flip=0.0, decode=kind)
    images = [crop.image(sample, sp.Rng(i, (epoch or 0, 0, 0))) for i, (sample, _) in enumerate(digits)]
    return crop.normalize(torch.stack(images))  # type: ignore[arg-type]


def fitted(epochs: list[torch.Tensor], labels: torch.Tensor, seed: int) -> torch.nn.Module:
    """A network of three convolutions, trained from this seed."""
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


def main() -> None:
    measures: dict[str, Callable[[str], Any]] = {
        "scaled": lambda _: scaled(),
        "quality": lambda _: quality(),
        "arrays": lambda _: arrays(),
        "peers": peers_of_images,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[*measures, []], default=[])
    parser.add_argument("--only", default="", help="of `peers`: what has this in its title")
    parser.add_argument("--json", type=Path, help="write the numbers there as well")
    args = parser.parse_args()
    console.print(f"Python {sys.version.split()[0]}, Pillow {PIL.__version__}, torch {torch.__version__}")
    numbers = {name: measures[name](args.only) for name in args.what or measures}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=2))


if __name__ == "__main__":
    main()

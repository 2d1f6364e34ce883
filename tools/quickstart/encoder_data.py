"""The data of train_encoders.py, as files.

`0001.png` beside `0001.json` is a sample; so are `0001.0.png`, `0001.1.png` and `0001.json`.
"""

from __future__ import annotations

import json
import random
import wave
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
RATE = 16_000  # Hz, of sounds
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz: a key of a telephone sounds by its row and its column
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True, slots=True)
class Digit:
    """A scanned digit."""

    pixels: Any  # uint8 (8, 8)
    number: int

    @property
    def name(self) -> str:
        """Its name in English."""
        return NAMES[self.number]


@cache
def digits() -> list[Digit]:
    """The 1,797 that come with scikit-learn."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    grey = (loaded.images * (255 / 16)).astype("uint8")
    return [Digit(pixels, int(number)) for pixels, number in zip(grey, loaded.target, strict=True)]


def write_classes(folder: Path) -> None:
    """A digit and its class."""
    for number, digit in enumerate(digits()):
        Image.fromarray(digit.pixels).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.cls").write_text(str(digit.number))


def write_pairs(folder: Path) -> None:
    """One digit above another, and two ways to say so."""
    draw = random.Random(0)
    for number, upper in enumerate(digits()):
        lower = draw.choice(digits())
        canvas = np.zeros((16, 16), "uint8")
        canvas[:8, 4:12], canvas[8:, 4:12] = upper.pixels, lower.pixels
        Image.fromarray(canvas).save(folder / f"{number:04}.png")
        captions = [f"{upper.name} above {lower.name}", f"{lower.name} below {upper.name}"]
        (folder / f"{number:04}.json").write_text(json.dumps({"captions": captions}))


def write_chats(folder: Path) -> None:
    """One to three digits, which they are, and which of them is the largest: LLaVA's way and OpenAI's in turns."""
    for number in range(len(digits()) - 3):
        shown = digits()[number : number + 1 + number % 3]
        names, largest = ", ".join(digit.name for digit in shown), max(shown, key=lambda digit: digit.number)
        turns = [("Which digits are these?", names), ("Which is the largest?", largest.name)]
        for position, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{position}.png")
        record = as_llava(turns, len(shown)) if number % 2 else as_openai(turns, len(shown))
        (folder / f"{number:04}.json").write_text(json.dumps(record))


def as_llava(turns: list[tuple[str, str]], images: int) -> Any:
    """The first question begins with the images."""
    sides = [(side, text) for turn in turns for side, text in zip(("human", "gpt"), turn, strict=True)]
    sides[0] = ("human", "<image>" * images + "\n" + sides[0][1])
    return {"conversations": [{"from": side, "value": text} for side, text in sides]}


def as_openai(turns: list[tuple[str, str]], images: int) -> Any:
    """The first question ends with the images."""
    sides: list[tuple[str, Any]] = [
        (side, text) for turn in turns for side, text in zip(("user", "assistant"), turn, strict=True)
    ]
    sides[0] = ("user", [{"type": "text", "text": sides[0][1]}, *[{"type": "image"}] * images])
    return {"messages": [{"role": side, "content": content} for side, content in sides]}


def write_documents(folder: Path) -> None:
    """Up to four digits, each followed by its name and what comes next: OBELICS' way."""
    for number in range(len(digits()) - 4):
        shown = digits()[number : number + 1 + number % 4]
        texts: list[str | None] = ["Scanned digits:"]
        places: list[str | None] = [None]
        for position, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{position}.png")
            texts += [None, f"is a {digit.name}, before {NAMES[(digit.number + 1) % 10]}."]
            places += [f"{position}.png", None]
        (folder / f"{number:04}.json").write_text(json.dumps({"texts": texts, "images": places}))


def write_sounds(folder: Path) -> None:
    """Two or three digits as a telephone dials them, with hiss between, and their names."""
    draw = np.random.default_rng(0)
    for number in range(len(digits()) - 3):
        dialled = digits()[number : number + 2 + number % 2]
        sound = np.concatenate([dialled_tone(key_of(digit.number), draw) for digit in dialled])
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(sound), "NONE", ""))
            file.writeframes((8_000 * sound).astype("<i2").tobytes())
        (folder / f"{number:04}.txt").write_text(" ".join(digit.name for digit in dialled))


def key_of(number: int) -> tuple[int, int]:
    """The two tones of a digit: 1 2 3 are the first row, 0 is in the middle of the last."""
    position = number - 1 if number else 10
    return ROWS[position // 3], COLUMNS[position % 3]


def dialled_tone(tones: tuple[int, int], draw: np.random.Generator) -> Any:
    """Both tones for 0.2 to 0.3 s, float64 (n,), fading."""
    time = np.arange(draw.integers(int(0.2 * RATE), int(0.3 * RATE))) / RATE
    sound = sum(np.sin(2 * np.pi * tone * time) for tone in tones) * np.exp(-10 * time)
    return sound + draw.normal(0, 0.02, len(time))


def write_videos(folder: Path) -> None:
    """A digit that moves to one side for a second, and a conversation about that."""
    import av  # of the extra [media]

    for number, digit in enumerate(digits()):
        way, (down, right) = list(WAYS.items())[number % 4]
        with av.open(str(folder / f"{number:04}.mp4"), "w") as file:
            stream = file.add_stream("mpeg4", rate=12, width=32, height=32, pix_fmt="yuv420p", bit_rate=200_000)
            for step in range(-6, 6):
                canvas = np.zeros((32, 32, 3), "uint8")
                top, left = 8 + down * step, 8 + right * step
                canvas[top : top + 16, left : left + 16] = digit.pixels.repeat(2, 0).repeat(2, 1)[..., None]
                file.mux(stream.encode(av.VideoFrame.from_ndarray(canvas)))
            file.mux(stream.encode())
        record = as_llava([("<video>\nWhat is seen?", f"{digit.name} moves {way}")], 0)
        (folder / f"{number:04}.json").write_text(json.dumps(record))

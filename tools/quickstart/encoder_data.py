"""Test data of train_encoders.py, as files.

Files with one name form a sample, such as `0001.png` and `0001.json`, or `0001.0.png`, `0001.1.png` and `0001.json`.
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
RATE = 16_000  # Hz, of audio
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)  # Hz: the two tones of a telephone key
DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@dataclass(frozen=True, slots=True)
class Digit:
    """Image of a scanned digit, and the digit."""

    pixels: Any  # uint8 (8, 8)
    number: int

    @property
    def name(self) -> str:
        """The English name of the digit."""
        return NAMES[self.number]


@cache
def digits() -> list[Digit]:
    """Return the 1,797 scanned digits of scikit-learn."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    grey = (loaded.images * (255 / 16)).astype("uint8")
    return [Digit(pixels, int(number)) for pixels, number in zip(grey, loaded.target, strict=True)]


def write_classes(folder: Path) -> None:
    """Write images of digits with their classes."""
    for number, digit in enumerate(digits()):
        Image.fromarray(digit.pixels).save(folder / f"{number:04}.png")
        (folder / f"{number:04}.cls").write_text(str(digit.number))


def write_pairs(folder: Path) -> None:
    """Write images of one digit above another, each with two captions."""
    rng = random.Random(0)
    for number, upper in enumerate(digits()):
        lower = rng.choice(digits())
        canvas = np.zeros((16, 16), "uint8")
        canvas[:8, 4:12], canvas[8:, 4:12] = upper.pixels, lower.pixels
        Image.fromarray(canvas).save(folder / f"{number:04}.png")
        captions = [f"{upper.name} above {lower.name}", f"{lower.name} below {upper.name}"]
        (folder / f"{number:04}.json").write_text(json.dumps({"captions": captions}))


def write_chats(folder: Path) -> None:
    """Write conversations about one to three digits, alternately in the formats of LLaVA and OpenAI."""
    for number in range(len(digits()) - 3):
        shown = digits()[number : number + 1 + number % 3]
        names = ", ".join(digit.name for digit in shown)
        largest = max(shown, key=lambda digit: digit.number)
        turns = [("Which digits are these?", names), ("Which is the largest?", largest.name)]
        for position, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{position}.png")
        record = as_llava(turns, len(shown)) if number % 2 else as_openai(turns, len(shown))
        (folder / f"{number:04}.json").write_text(json.dumps(record))


def as_llava(turns: list[tuple[str, str]], images: int) -> Any:
    """Format questions and answers as LLaVA does. The first question starts with the images."""
    messages = [(role, text) for turn in turns for role, text in zip(("human", "gpt"), turn, strict=True)]
    messages[0] = ("human", "<image>" * images + "\n" + messages[0][1])
    return {"conversations": [{"from": role, "value": text} for role, text in messages]}


def as_openai(turns: list[tuple[str, str]], images: int) -> Any:
    """Format questions and answers as OpenAI does. The first question ends with the images."""
    messages: list[tuple[str, Any]] = [
        (role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages[0] = ("user", [{"type": "text", "text": messages[0][1]}, *[{"type": "image"}] * images])
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def write_documents(folder: Path) -> None:
    """Write documents in the format of OBELICS: up to four digits, each followed by a sentence about it."""
    for number in range(len(digits()) - 4):
        shown = digits()[number : number + 1 + number % 4]
        texts: list[str | None] = ["Scanned digits:"]
        images: list[str | None] = [None]
        for position, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{position}.png")
            texts += [None, f"is a {digit.name}, before {NAMES[(digit.number + 1) % 10]}."]
            images += [f"{position}.png", None]
        (folder / f"{number:04}.json").write_text(json.dumps({"texts": texts, "images": images}))


def write_sounds(folder: Path) -> None:
    """Write audio of two or three digits dialled on a telephone, with their names."""
    rng = np.random.default_rng(0)
    for number in range(len(digits()) - 3):
        dialled = digits()[number : number + 2 + number % 2]
        sound = np.concatenate([dialled_tone(key_of(digit.number), rng) for digit in dialled])
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(sound), "NONE", ""))
            file.writeframes((8_000 * sound).astype("<i2").tobytes())
        (folder / f"{number:04}.txt").write_text(" ".join(digit.name for digit in dialled))


def key_of(number: int) -> tuple[int, int]:
    """Return the two tones of a digit. 1, 2 and 3 are the first row of keys, and 0 is in the middle of the last."""
    position = number - 1 if number else 10
    return ROWS[position // 3], COLUMNS[position % 3]


def dialled_tone(tones: tuple[int, int], rng: np.random.Generator) -> Any:
    """Return fading tones with noise for 0.2 to 0.3 s, float64 (n,)."""
    time = np.arange(rng.integers(int(0.2 * RATE), int(0.3 * RATE))) / RATE
    sound = sum(np.sin(2 * np.pi * tone * time) for tone in tones) * np.exp(-10 * time)
    return sound + rng.normal(0, 0.02, len(time))


def write_videos(folder: Path) -> None:
    """Write videos of a digit that moves in one direction for a second, each with a conversation."""
    import av  # from the extra [media]

    for number, digit in enumerate(digits()):
        direction, (down, right) = list(DIRECTIONS.items())[number % 4]
        with av.open(str(folder / f"{number:04}.mp4"), "w") as file:
            stream = file.add_stream("mpeg4", rate=12, width=32, height=32, pix_fmt="yuv420p", bit_rate=200_000)
            for step in range(-6, 6):
                canvas = np.zeros((32, 32, 3), "uint8")
                top, left = 8 + down * step, 8 + right * step
                canvas[top : top + 16, left : left + 16] = digit.pixels.repeat(2, 0).repeat(2, 1)[..., None]
                file.mux(stream.encode(av.VideoFrame.from_ndarray(canvas)))
            file.mux(stream.encode())
        record = as_llava([("<video>\nWhat is seen?", f"{digit.name} moves {direction}")], 0)
        (folder / f"{number:04}.json").write_text(json.dumps(record))

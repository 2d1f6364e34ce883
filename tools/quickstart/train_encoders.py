"""Seven more models, of the other task encoders, trained, killed and resumed as in the quick start; each bit compared.

    pip install 'savable_pipeline[dev]'
    python tools/quickstart/train_encoders.py                 all seven, about a quarter of an hour on two cores
    python tools/quickstart/train_encoders.py --only chat     classes, pairs, chat, documents, text, speech or videos

The data are made of what is there after installation: scanned digits, also dialled and in motion, and Python's own
source. Copy a pipeline and its encoder from section 2; the trainer is that of quickstart.py, the models are in
encoder_models.py.
"""

from __future__ import annotations

import json
import random
import wave
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers
import torch
import typer
from encoder_models import Classifier, Listener, SeeingTransformer, TwoTowers, WatchingTowers
from models import Transformer
from outcome import draw
from PIL import Image
from quickstart import CHECKPOINT_EVERY, Recipe, conclude, killed_and_resumed, prepare, write_python

import savable_pipeline as sp
from task_encoders.chat import ChatEncoder
from task_encoders.classification import ClassificationEncoder
from task_encoders.contrastive import ContrastiveEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.spec_augment import SpecAugment
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.vision import Vision
from task_encoders.speech import SpeechEncoder

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]  # ids 0 to 3
IMAGE_TOKEN = SPECIAL.index("<|image_pad|>")
VOCABULARY = 2_048
CHAT_LENGTH = DOCUMENT_LENGTH = 192  # tokens of a pack
TEXT_LENGTH = 256
CLIP_FRAMES = 4
KEYS = (
    (941, 1336),
    (697, 1209),
    (697, 1336),
    (697, 1477),
    (770, 1209),
    (770, 1336),
    (770, 1477),
    (852, 1209),
    (852, 1336),
    (852, 1477),
)  # Hz, of the tones of a telephone
NOTHING = 256  # the token of CTC that is no letter
RATE = 16_000  # Hz, of sounds
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}

# 1. Data, as files. `0001.png` beside `0001.json` is a sample; so are `0001.0.png`, `0001.1.png` and `0001.json`.


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
        for place, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{place}.png")
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
        for place, digit in enumerate(shown):
            Image.fromarray(digit.pixels).save(folder / f"{number:04}.{place}.png")
            texts += [None, f"is a {digit.name}, before {NAMES[(digit.number + 1) % 10]}."]
            places += [f"{place}.png", None]
        (folder / f"{number:04}.json").write_text(json.dumps({"texts": texts, "images": places}))


def write_sounds(folder: Path) -> None:
    """Two or three digits as a telephone dials them, with hiss between, and their names."""
    draw = np.random.default_rng(0)
    for number in range(len(digits()) - 3):
        dialled = digits()[number : number + 2 + number % 2]
        sound = np.concatenate([dialled_tone(KEYS[digit.number], draw) for digit in dialled])
        with wave.open(str(folder / f"{number:04}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, len(sound), "NONE", ""))
            file.writeframes((8_000 * sound).astype("<i2").tobytes())
        (folder / f"{number:04}.txt").write_text(" ".join(digit.name for digit in dialled))


def dialled_tone(tones: tuple[int, int], draw: np.random.Generator) -> Any:
    """Both tones for 0.4 to 0.6 s, float64 (n,), fading."""
    time = np.arange(draw.integers(int(0.4 * RATE), int(0.6 * RATE))) / RATE
    sound = sum(np.sin(2 * np.pi * tone * time) for tone in tones) * np.exp(-5 * time)
    return sound + draw.normal(0, 0.02, len(time))


def write_videos(folder: Path) -> None:
    """A digit that moves to one side for a second, and a sentence that says so."""
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
        (folder / f"{number:04}.txt").write_text(f"{digit.name} moves {way}")


# 2. What a sample becomes, and the pipeline of one lane. An encoder is built once a process.


def train_tokenizer(path: Path) -> None:
    """A byte-pair tokenizer of some of Python's source, with special tokens for chats and images."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))  # of Python's library
    made.train([str(source) for source in sources[:60]], trainer)
    made.save(str(path))


@cache
def tokenizer(path: Path) -> Tokenizer:
    """The one that was trained, ending texts with `<|endoftext|>`."""
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), eos=0)


CROP = SquareCrop(16, scale=(0.7, 1.0), flip=0.0)  # a mirrored 2 would be no 2
PAIRS = ContrastiveEncoder(text="json[captions]", crop=CROP)
CLIPS = sp.Clips(length_s=0.5, fps=2 * CLIP_FRAMES)
VIDEOS = ContrastiveEncoder(clips=CLIPS, crop=SquareCrop(16, scale=(0.9, 1.0), flip=0.0))
LETTERS = Tokenizer(lambda text: list(text.encode()))  # without a begin and an end, which are not heard
SOUNDS = SpeechEncoder(LETTERS, speeds=(0.9, 1.0, 1.1), masks=SpecAugment(band_width=8, time_width=10))


@cache
def class_encoder() -> ClassificationEncoder:
    """Made when it is used: what mixes its batches takes seconds to import."""
    return ClassificationEncoder(10, crop=CROP, mixup=0.2, cutmix=1.0)


@cache
def chat_encoder(path: Path) -> ChatEncoder:
    """ChatML; an image is doubled to 16 × 16 pixels, 4 tokens."""
    tiles = NativeSize(patch=4, merge=2, min_pixels=256, max_pixels=1_024)
    return ChatEncoder(tokenizer(path), vision=Vision(tiles, IMAGE_TOKEN, text="<|image_pad|>"), max_length=CHAT_LENGTH)


@cache
def document_encoder(path: Path) -> InterleavedEncoder:
    """An image is one tile of 16 × 16 pixels, 4 tokens."""
    vision = Vision(Tiles(patch=4, merge=2, side=16, max_tiles=2), IMAGE_TOKEN)
    return InterleavedEncoder(tokenizer(path), vision=vision, max_length=DOCUMENT_LENGTH)


@cache
def text_encoder(path: Path) -> LanguageModelingEncoder:
    """Source text; a long file becomes several items."""
    return LanguageModelingEncoder(tokenizer(path), max_length=TEXT_LENGTH, part="py")


def classes_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Images, randomly cropped and mixed; 32 a batch."""
    return sp.Batcher(sp.Encode(shuffled(shards, lane), class_encoder()), size=32)


def pairs_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Images with one of their captions; 32 a batch."""
    return sp.Batcher(sp.Encode(shuffled(shards, lane), PAIRS), size=32)


def chat_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Conversations end to end in packs; 4 packs a batch."""
    items = sp.Encode(shuffled(shards, lane), chat_encoder(shards.parent / "tokenizer.json"))
    return sp.Batcher(sp.OnlinePacker(items, max_length=CHAT_LENGTH), size=4)


def documents_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Documents end to end in packs; 4 packs a batch."""
    items = sp.Encode(shuffled(shards, lane), document_encoder(shards.parent / "tokenizer.json"))
    return sp.Batcher(sp.OnlinePacker(items, max_length=DOCUMENT_LENGTH), size=4)


def text_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Pieces of source files end to end in packs; 4 packs a batch."""
    items = sp.Encode(shuffled(shards, lane), text_encoder(shards.parent / "tokenizer.json"))
    return sp.Batcher(sp.OnlinePacker(items, max_length=TEXT_LENGTH), size=4)


def speech_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """Sounds, a little faster or slower, and their text; 32 a batch."""
    return sp.Batcher(sp.Encode(shuffled(shards, lane), SOUNDS), size=32)


def videos_pipeline(shards: Path, lane: sp.Lane) -> sp.Stage:
    """A clip of half a second of each video, randomly cropped, and its text; 32 a batch."""
    return sp.Batcher(sp.Encode(shuffled(shards, lane), VIDEOS), size=32)


def shuffled(shards: Path, lane: sp.Lane) -> sp.SampleStage:
    """Samples through a small buffer."""
    return sp.ShuffleBuffer(sp.TarShardReader(str(shards), lane), size=64)


SEEING = partial(SeeingTransformer, image_token=IMAGE_TOKEN, patch=4, merge=2, vocabulary=VOCABULARY)
RECIPES = [
    Recipe(
        "classes", "CNN, mixed digits", write_classes, classes_pipeline, partial(Classifier, image_size=16, classes=10)
    ),
    Recipe(
        "pairs", "two towers, digits", write_pairs, pairs_pipeline, partial(TwoTowers, image_size=16, longest_text=77)
    ),
    Recipe("chat", "chats about digits", write_chats, chat_pipeline, partial(SEEING, max_length=CHAT_LENGTH)),
    Recipe(
        "documents",
        "documents with digits",
        write_documents,
        documents_pipeline,
        partial(SEEING, max_length=DOCUMENT_LENGTH),
    ),
    Recipe(
        "text",
        "transformer, Python's library",
        write_python,
        text_pipeline,
        partial(Transformer, max_length=TEXT_LENGTH, vocabulary=VOCABULARY),
    ),
    Recipe("speech", "CTC, dialled digits", write_sounds, speech_pipeline, partial(Listener, nothing=NOTHING)),
    Recipe(
        "videos",
        "two towers, digits in motion",
        write_videos,
        videos_pipeline,
        partial(WatchingTowers, frames=CLIP_FRAMES, image_size=16, longest_text=77),
    ),
]
STEPS = {"classes": 400, "pairs": 2400, "chat": 700, "documents": 300, "text": 300, "speech": 600, "videos": 600}

# 3. The experiment.


def main(
    out: Annotated[Path, typer.Option(help="For data, logs, checkpoints, the picture.")] = Path("train_encoders_run"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(STEPS)}; all by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=2 * CHECKPOINT_EVERY, help="Steps of each run.")] = None,
) -> None:
    """Train, kill, resume and compare; exits with 1 if a single bit differs."""
    if only is not None and only not in STEPS:
        raise typer.BadParameter(f"--only {only}: expected one of {', '.join(STEPS)}")
    torch.set_num_threads(1)  # what is forked must not miss the other threads
    trials = []
    for recipe in RECIPES:
        if only in (None, recipe.name):
            folder = out / recipe.name
            prepare(recipe, folder)
            train_tokenizer(folder / "tokenizer.json")
            trials.append(killed_and_resumed(recipe, folder, steps or STEPS[recipe.name]))
    draw(trials, out / "loss.png")
    conclude({trial.name: trial.difference for trial in trials}, out / "loss.png")


if __name__ == "__main__":
    typer.run(main)

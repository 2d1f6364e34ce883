"""Train, kill, resume and compare eight more models, for all task encoders, as in the quick start.

    pip install 'savable_pipeline[dev]'
    python tools/quickstart/train_encoders.py                 all eight, about a quarter of an hour on two cores
    python tools/quickstart/train_encoders.py --only chat     or classes, pairs, documents, text, speech, videos, films

encoder_data.py writes the data from scanned digits, also dialled and in motion, and from Python's own source. So
nothing is downloaded. Copy a pipeline and its encoder from section 1. The trainer is in quickstart.py, and the models
are in encoder_models.py.
"""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import tokenizers
import torch
import typer
from encoder_data import NAMES, write_chats, write_classes, write_documents, write_pairs, write_sounds, write_videos
from encoder_models import Classifier, Listener, SeeingTransformer, TwoTowers, WatchingTowers, WatchingTransformer
from models import Transformer
from outcome import draw
from quickstart import CHECKPOINT_EVERY, Recipe, conclude, kill_and_resume, prepare, write_python

import savable_pipeline as sp
from task_encoders.chat import ChatEncoder
from task_encoders.classification import ClassificationEncoder
from task_encoders.contrastive import ContrastiveEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.video_tokens import VideoTokens
from task_encoders.parts.vision import Vision
from task_encoders.speech import SpecAugment, SpeechEncoder

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image_pad|>"]  # ids 0 to 3
IMAGE_TOKEN = SPECIAL.index("<|image_pad|>")
VOCABULARY = 2_048
CHAT_LENGTH = DOCUMENT_LENGTH = 192  # tokens of a pack
TEXT_LENGTH = 256
CLIP_FRAMES = 4

# 1. Define the encoders and pipelines. Each process builds an encoder once.


def train_tokenizer(path: Path) -> None:
    """Train a byte-pair tokenizer on some of Python's source, with special tokens for chats and images."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    sources = sorted(Path(json.__file__).parents[1].glob("*.py"))  # source files of Python's library
    trained.train([str(source) for source in sources[:60]], trainer)
    trained.save(str(path))


@cache
def tokenizer(path: Path) -> Tokenizer:
    """Load a trained tokenizer. Texts end with `<|endoftext|>`."""
    return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), eos=0)


CROP = SquareCrop(16, scale=(0.7, 1.0), flip=0.0)  # a mirrored 2 would be no 2
PAIRS = ContrastiveEncoder(text="json[captions]", crop=CROP)
CLIPS = sp.Clips(length_s=0.5, fps=2 * CLIP_FRAMES)
VIDEOS = ContrastiveEncoder(
    text="json[conversations][1][value]", clips=CLIPS, crop=SquareCrop(16, scale=(0.9, 1.0), flip=0.0)
)
WORDS = Tokenizer(lambda text: [NAMES.index(word) for word in text.split()])
SOUNDS = SpeechEncoder(WORDS, speeds=(0.9, 1.0, 1.1), masks=SpecAugment(band_width=8, time_width=10))


@cache
def class_encoder() -> ClassificationEncoder:
    """Build the encoder of classes on first use, because it imports torchvision, which takes seconds."""
    return ClassificationEncoder(10, crop=CROP, mixup=0.2, cutmix=1.0)


@cache
def chat_encoder(path: Path) -> ChatEncoder:
    """Build the encoder of chats in ChatML. Images are enlarged to 16 × 16 pixels, 4 tokens."""
    tiles = NativeSize(patch=4, merge=2, min_pixels=256, max_pixels=1_024)
    return ChatEncoder(tokenizer(path), vision=Vision(tiles, IMAGE_TOKEN, text="<|image_pad|>"), max_length=CHAT_LENGTH)


@cache
def film_encoder(path: Path) -> ChatEncoder:
    """Build the encoder of chats about videos. Four frames of a video are two steps of 16 tokens."""
    video = VideoTokens(IMAGE_TOKEN, fps=4, patch=4, merge=2, min_pixels=1_024, max_pixels=1_024)
    return ChatEncoder(tokenizer(path), video=video, max_length=CHAT_LENGTH)


@cache
def document_encoder(path: Path) -> InterleavedEncoder:
    """Build the encoder of documents. An image is one tile of 16 × 16 pixels, 4 tokens."""
    vision = Vision(Tiles(patch=4, merge=2, side=16, max_tiles=2), IMAGE_TOKEN)
    return InterleavedEncoder(tokenizer(path), vision=vision, max_length=DOCUMENT_LENGTH)


@cache
def text_encoder(path: Path) -> LanguageModelingEncoder:
    """Build the encoder of source text. A long file becomes several items."""
    return LanguageModelingEncoder(tokenizer(path), max_length=TEXT_LENGTH, part="py")


def classes_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 32 randomly cropped and mixed images."""
    return sp.read(shards).shuffle(64).encode(class_encoder()).batch(32)


def pairs_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 32 images with one of their captions each."""
    return sp.read(shards).shuffle(64).encode(PAIRS).batch(32)


def chat_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 4 packs of conversations."""
    encoder = chat_encoder(shards.parent / "tokenizer.json")
    return sp.read(shards).shuffle(64).encode(encoder).pack(max_length=CHAT_LENGTH).batch(4)


def documents_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 4 packs of documents."""
    encoder = document_encoder(shards.parent / "tokenizer.json")
    return sp.read(shards).shuffle(64).encode(encoder).pack(max_length=DOCUMENT_LENGTH).batch(4)


def text_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 4 packs of pieces of source files."""
    encoder = text_encoder(shards.parent / "tokenizer.json")
    return sp.read(shards).shuffle(64).encode(encoder).pack(max_length=TEXT_LENGTH).batch(4)


def speech_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 16 recordings at random speeds, with their text."""
    return sp.read(shards).shuffle(64).encode(SOUNDS).batch(16)


def videos_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 32 randomly cropped clips of half a second, with their text."""
    return sp.read(shards).shuffle(64).encode(VIDEOS).batch(32)


def films_pipeline(shards: Path) -> sp.Pipeline:
    """Build batches of 4 packs of conversations about videos."""
    encoder = film_encoder(shards.parent / "tokenizer.json")
    return sp.read(shards).shuffle(64).encode(encoder).pack(max_length=CHAT_LENGTH).batch(4)


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
    Recipe("speech", "CTC, dialled digits", write_sounds, speech_pipeline, partial(Listener, words=10)),
    Recipe(
        "videos",
        "two towers, digits in motion",
        write_videos,
        videos_pipeline,
        partial(WatchingTowers, frames=CLIP_FRAMES, image_size=16, longest_text=77),
    ),
    Recipe(
        "films",
        "chats about digits in motion",
        write_videos,
        films_pipeline,
        partial(
            WatchingTransformer,
            video_token=IMAGE_TOKEN,
            token_pixels=3 * 2 * 8 * 8,
            max_length=CHAT_LENGTH,
            vocabulary=VOCABULARY,
        ),
    ),
]
STEPS = {
    "classes": 400,
    "pairs": 2400,
    "chat": 700,
    "documents": 300,
    "text": 300,
    "speech": 300,
    "videos": 300,
    "films": 300,
}

# 2. Train, kill, resume and compare.


def main(
    out: Annotated[Path, typer.Option(help="The folder of data, logs and the picture.")] = Path("train_encoders_run"),
    only: Annotated[str | None, typer.Option(help=f"One of {', '.join(STEPS)}; all by default.")] = None,
    steps: Annotated[int | None, typer.Option(min=2 * CHECKPOINT_EVERY, help="Steps of each run.")] = None,
) -> None:
    """Train, kill, resume and compare. Exits with 1 if any bit differs."""
    if only is not None and only not in STEPS:
        raise typer.BadParameter(f"--only {only}: expected one of {', '.join(STEPS)}")
    torch.set_num_threads(1)  # a forked process would not have the other threads
    trials = []
    for recipe in RECIPES:
        if only in (None, recipe.name):
            folder = out / recipe.name
            prepare(recipe, folder)
            train_tokenizer(folder / "tokenizer.json")
            trials.append(kill_and_resume(recipe, folder, steps or STEPS[recipe.name]))
    draw(trials, out / "loss.png")
    conclude({trial.name: trial.difference for trial in trials}, out / "loss.png")


if __name__ == "__main__":
    typer.run(main)

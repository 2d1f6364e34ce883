"""Every encoder, on real data, through whole pipelines cut at every step: not one byte of any batch differs."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from PIL import Image

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.batch_difference import first_difference
from savable_pipeline.testing import assert_exact_resume
from task_encoders.captioning import CaptioningEncoder
from task_encoders.chat import ChatEncoder
from task_encoders.classification import ClassificationEncoder
from task_encoders.contrastive import ContrastiveEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.audio_tokens import AudioTokens
from task_encoders.parts.chat_template import ChatML
from task_encoders.parts.image_tiles import Buckets, NativeSize, Tiles
from task_encoders.parts.medium import MRope
from task_encoders.parts.square_crop import SquareCrop
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.video_tokens import VideoTokens
from task_encoders.parts.vision import Vision
from task_encoders.speech import SpecAugment, SpeechEncoder
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.toy_samples import NAMES, digits, python_sources, trained_tokenizer, write_samples

CROP = SquareCrop(12, scale=(0.6, 1.0))
EXACT = SquareCrop(12, scale=(0.6, 1.0), decode="exact")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def own_tokenizer() -> Any:
    """Return a tokenizer of transformers with a chat template."""
    from transformers import PreTrainedTokenizerFast  # takes a second

    made = PreTrainedTokenizerFast(tokenizer_object=trained_tokenizer(), eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


def vision(tiles: Any, decode: Any = "scaled") -> Vision:
    """Return a vision setting whose image tokens are the tokenizer's `<|image_pad|>`."""
    return Vision(tiles, trained_tokenizer().token_to_id("<|image_pad|>"), text="<|image_pad|>", decode=decode)


@cache
def photos() -> list[tuple[bytes, int]]:
    """Yield digits as JPEGs of several sizes, for which a half, a quarter or an eighth suffices."""
    made = []
    for number, (image, n) in enumerate(digits()):
        file = io.BytesIO()
        size = (31 + number % 7 * 16, 37 + number % 5 * 14)
        Image.open(io.BytesIO(image)).resize(size, Image.Resampling.BICUBIC).save(file, "JPEG")
        made.append((file.getvalue(), n))
    return made


def labelled_digits() -> list[dict[str, Any]]:
    """Yield digits with their class, a caption, and three captions of which one is drawn."""
    return [
        {"jpg": image, "cls": str(n), "txt": f"a scanned {NAMES[n]}", "json": {"texts": [NAMES[n], f"a {n}", f"{n}!"]}}
        for image, n in photos()[:40]
    ]


def conversations() -> list[dict[str, Any]]:
    """Yield conversations about one to three digits in two formats. Every tenth has no answer."""
    samples: list[dict[str, Any]] = []
    for first in range(40):
        shown = photos()[first : first + 1 + first % 3]
        images = {f"{i}.jpg": image for i, (image, _) in enumerate(shown)}
        answer = "" if first % 10 == 0 else " and ".join(NAMES[n] for _, n in shown)
        if first % 2:
            asked = [{"type": "text", "text": "Which?"}, *[{"type": "image"}] * len(shown)]
            record: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        else:
            turns = [{"from": "human", "value": "<image> " * len(shown)}, {"from": "gpt", "value": answer}]
            record = {"conversations": turns if answer else turns[:1]}
        samples.append({"json": record, **images})
    return samples


@cache
def video_conversations() -> list[dict[str, Any]]:
    """Yield conversations about one or two short videos, audio and a digit."""
    videos = [video_bytes(6 + 3 * number, fps=6, size=(16, 16)) for number in range(3)]
    sounds = [audio_bytes(0.1 + 0.03 * number) for number in range(4)]
    samples: list[dict[str, Any]] = []
    for number in range(32):
        question = ["<video>", "<audio><video>", "<image><video>", "<video> or <video>"][number % 4]
        parts: dict[str, Any] = {f"{i}.mp4": videos[(number + i) % 3] for i in range(question.count("<video>"))}
        parts |= {"flac": sounds[number % 3]} if "<audio>" in question else {}
        parts |= {"jpg": photos()[number][0]} if "<image>" in question else {}
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": NAMES[number % 10]}]
        samples.append({"json": {"conversations": turns}, **parts})
    return samples


def documents() -> list[dict[str, Any]]:
    """Yield parts of Python's source with up to three digits between them."""
    samples = []
    for number, (name, text) in enumerate(python_sources()[:40]):
        images = {f"{i}.jpg": photos()[number + i][0] for i in range(number % 4)}
        texts: list[str | None] = [name]
        places: list[str | None] = [None]
        for i, image in enumerate(images):
            texts += [None, text[80 * i : 80 * i + 80]]
            places += [image, None]
        samples.append({"json": {"texts": texts, "images": places}, **images})
    return samples


def sources() -> list[dict[str, Any]]:
    """Yield Python's source, as text and as a prompt with its completion."""
    return [{"py": text, "json": {"prompt": f"# {name}\n", "code": text[:300]}} for name, text in python_sources()[:40]]


@cache
def tones() -> list[dict[str, Any]]:
    """Yield tones of several lengths, rates and containers. Every ninth has no text, and every eleventh is long."""
    made = []
    for number in range(24):
        container = ("flac", "wav", "ogg")[number % 3]
        seconds = 0.1 + number % 7 * 0.05 + (number % 11 == 0)
        audio = audio_bytes(
            seconds, rate=(16_000, 44_100, 48_000)[number % 3], channels=1 + number % 2, container=container
        )
        made.append({container: audio, "txt": "" if number % 9 == 0 else f"tone {number}"})
    return made


@cache
def videos() -> list[dict[str, Any]]:
    """Yield videos of half a second with two captions each."""
    return [
        {"mp4": video_bytes(6, fps=12, size=(48, 32), gop=3, noise=1 + n), "json": {"texts": [f"video {n}", "another"]}}
        for n in range(12)
    ]


CASES: dict[str, tuple[Any, Any, int | None]] = {  # an encoder, its samples, and the length of packs
    "classes": (lambda: ClassificationEncoder(10, crop=CROP), labelled_digits, None),
    "mixed classes": (lambda: ClassificationEncoder(10, crop=EXACT, mixup=0.4, cutmix=1.0), labelled_digits, None),
    "captions": (
        lambda: CaptioningEncoder(trained_tokenizer(), image_size=12, decode="exact", eos=False),
        labelled_digits,
        None,
    ),
    "packed captions": (lambda: CaptioningEncoder(image_size=12), labelled_digits, 80),
    "pairs": (lambda: ContrastiveEncoder(text="json[texts]", crop=CROP), labelled_digits, None),
    "chat": (
        lambda: ChatEncoder(
            own_tokenizer(), vision=vision(NativeSize(patch=4, merge=1, min_pixels=16, max_pixels=144))
        ),
        conversations,
        None,
    ),
    "packed chat": (
        lambda: ChatEncoder(
            own_tokenizer(), vision=vision(Tiles(patch=2, merge=2, side=8, max_tiles=2), "exact"), max_length=90
        ),
        conversations,
        90,
    ),
    "packed chat with videos and sounds": (
        lambda: ChatEncoder(
            vision=Vision(NativeSize(patch=4, merge=1, min_pixels=16, max_pixels=64), 300),
            video=VideoTokens(301, patch=8, merge=1, min_pixels=64, max_pixels=256),
            audio=AudioTokens(302, bins=80),
            rope=MRope(),
            template=ChatML("<", ">"),
            max_length=90,
        ),
        video_conversations,
        90,
    ),
    "packed documents": (
        lambda: InterleavedEncoder(
            Tokenizer(trained_tokenizer(), eos=3),
            vision=vision(Buckets(patch=2, merge=2, max_pixels=64, min_side=4, max_side=16)),
            max_length=96,
        ),
        documents,
        96,
    ),
    "packed text": (
        lambda: LanguageModelingEncoder(trained_tokenizer(), max_length=128, part="py", eos=3),
        sources,
        128,
    ),
    "packed prompts": (
        lambda: LanguageModelingEncoder(max_length=400, part="json[code]", prompt="json[prompt]"),
        sources,
        400,
    ),
    "speech": (
        lambda: SpeechEncoder(max_s=1.0, speeds=(0.9, 1.0, 1.1), masks=SpecAugment(band_width=9, time_width=9)),
        tones,
        None,
    ),
    "packed speech": (lambda: SpeechEncoder(trained_tokenizer(), max_s=1.0, eos="<|endoftext|>"), tones, 60),
    "clips of videos": (
        lambda: ContrastiveEncoder(text="json[texts]", crop=CROP, clips=sp.Clips(length_s=0.2, fps=10, count=2)),
        videos,
        None,
    ),
}


BY_TORCHVISION = {"mixed classes"}  # which draws in the default type of tensors
IN_WORKERS = {"mixed classes", "packed chat with videos and sounds"}  # by torch's generator; with fields of every kind


@pytest.fixture(scope="module")
def shards_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], list[dict[str, Any]]]], str]:
    """Return a function that writes samples once, and returns their folder."""

    @cache
    def written(samples: Callable[[], list[dict[str, Any]]]) -> str:
        return str(write_samples(tmp_path_factory.mktemp(samples.__name__), samples()))

    return written


def pipeline(shards: str, encoder: sp.TaskEncoder, max_length: int | None, lane: sp.Lane) -> custom.Stage:
    """Every stage, with a packer where `max_length` is given."""
    stage: custom.Stage = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=10)
    stage = sp.Encode(stage, encoder)
    if max_length is not None:
        stage = sp.OnlinePacker(stage, max_length=max_length, open_packs=3)
    return sp.Batcher(stage, size=3)


@pytest.mark.parametrize("case", CASES)
def test_every_interruption_and_chains_with_other_workers_and_ranks_are_exact(case: str, shards_of: Any) -> None:
    make, samples, max_length = CASES[case]
    build = partial(pipeline, shards_of(samples), make(), max_length)
    workers = (0, 2) if case in IN_WORKERS else (0,)
    assert assert_exact_resume(build, lanes=2, steps=6, workers=workers, world_sizes=(1, 2), chains=1, after=2) > 6


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_more_interruptions_and_longer_chains_in_workers_are_exact(case: str, shards_of: Any) -> None:
    make, samples, max_length = CASES[case]
    build = partial(pipeline, shards_of(samples), make(), max_length)
    assert assert_exact_resume(build, lanes=4, steps=12, workers=(0, 2), world_sizes=(1, 2), chains=3) > 12


@pytest.mark.parametrize("case", sorted(CASES.keys() - BY_TORCHVISION))
def test_no_batch_depends_on_the_default_type_of_the_trainers_tensors(case: str, shards_of: Any) -> None:
    make, samples, max_length = CASES[case]

    def batch() -> Any:
        return next(pipeline(shards_of(samples), make(), max_length, sp.Lane(seed=1)))

    plain = batch()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = batch()
    finally:
        torch.set_default_dtype(torch.float32)
    assert first_difference(plain, found) is None

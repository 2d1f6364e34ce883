"""What an encoder's `settings` say in a state: every argument, in plain values; a pickled copy says the same."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import savable_pipeline as sp
from task_encoders import (
    AudioTokens,
    CaptioningEncoder,
    ChatEncoder,
    ChatML,
    ClassificationEncoder,
    ContrastiveEncoder,
    InterleavedEncoder,
    LanguageModelingEncoder,
    MRope,
    NativeSize,
    OwnTemplate,
    SpecAugment,
    SpeechEncoder,
    SquareCrop,
    Tiles,
    Tokenizer,
    VideoFrames,
    VideoTokens,
    Vision,
)
from tests.support.toy_samples import trained_tokenizer, word_lengths
from tests.task_encoders.test_chat import TEMPLATE, own_tokenizer

SMALL = NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256)
CLIPS = sp.Clips(length_s=0.5, fps=8)
MEDIA: dict[str, Any] = {
    "vision": Vision(SMALL, 300),
    "video": VideoTokens(301, patch=8, merge=2, fps=4),
    "audio": AudioTokens(302, bins=80),
    "rope": MRope(),
}
OTHER_MEDIA: list[dict[str, Any]] = [
    {"vision": Vision(SMALL, 303)},
    {"vision": Vision(NativeSize(), 300)},
    {"vision": Vision(SMALL, 300, after="!")},
    {"vision": Vision(SMALL, 300, decode="exact")},
    {"vision": Vision(SMALL, 300, exif=False)},
    {"video": None},
    {"video": VideoFrames(tiles=Tiles(2, 2, 4))},
    {"video": VideoFrames(tiles=SMALL)},
    {"video": VideoTokens(301)},
    {"audio": None},
    {"audio": AudioTokens(302)},
    {"rope": None},
    {"rope": MRope(None)},
    {"tokenizer": word_lengths},
    {"tokenizer": Tokenizer(word_lengths, eos=9)},
    {"max_length": 9},
    {"part": "doc"},
    {"multiple": 8},
]
CROPS = [{"crop": SquareCrop(**changed)} for changed in ({"size": 9}, {"decode": "exact"}, {"exif": False})]
CHANGES: dict[type[sp.TaskEncoder], tuple[dict[str, Any], list[dict[str, Any]]]] = {
    ClassificationEncoder: (
        {"classes": 10},
        [
            {"classes": 11},
            {"label": "json[label]"},
            {"names": tuple("abcdefghij")},
            *CROPS,
            {"mixup": 0.1},
            {"cutmix": 0.1},
        ],
    ),
    CaptioningEncoder: (
        {},
        [
            {"tokenizer": word_lengths},
            {"image_size": 32},
            {"max_tokens": 9},
            {"augment": False},
            {"crop_scale": (0.9, 1.0)},
            {"flip": 0.0},
            {"mean": (0.5, 0.5, 0.5)},
            {"std": (0.5, 0.5, 0.5)},
            {"caption": "alt"},
            {"decode": "exact"},
            {"exif": False},
            {"multiple": 8},
        ],
    ),
    ContrastiveEncoder: (
        {},
        [
            {"tokenizer": word_lengths},
            {"text": "md"},
            *CROPS,
            {"max_tokens": 9},
            {"clips": CLIPS},
            {"clips": sp.Clips(length_s=0.5, fps=4)},
            {"clips": CLIPS, "video": "mov"},
        ],
    ),
    ChatEncoder: (
        MEDIA,
        [
            *OTHER_MEDIA,
            {"tokenizer": trained_tokenizer()},
            {"vision": None},
            {"template": ChatML("<", ">")},
            {"template": OwnTemplate(own_tokenizer())},
            {"template": OwnTemplate(own_tokenizer(), {"enable_thinking": False})},
            {"template": OwnTemplate(own_tokenizer(), content="parts")},
            {"template": OwnTemplate(own_tokenizer(TEMPLATE + " "))},
            {"answers": "last"},
        ],
    ),
    InterleavedEncoder: (MEDIA, OTHER_MEDIA),
    LanguageModelingEncoder: (
        {},
        [{"tokenizer": word_lengths}, {"max_length": 8}, {"part": "md"}, {"prompt": "json[asked]"}, {"multiple": 8}],
    ),
    SpeechEncoder: (
        {},
        [
            {"tokenizer": word_lengths},
            {"text": "md"},
            {"audio": "wav"},
            {"bins": 128},
            {"frames": 3_000},
            {"min_s": 0.2},
            {"max_s": 20.0},
            {"speeds": (0.9, 1.1)},
            {"masks": SpecAugment()},
            {"masks": SpecAugment(times=1)},
        ],
    ),
}


@pytest.mark.parametrize("encoder", CHANGES, ids=lambda encoder: encoder.__name__)
def test_settings_change_with_every_argument_and_are_plain(encoder: Any) -> None:
    given, changes = CHANGES[encoder]
    made = [encoder(**{**given, **changed}) for changed in ({}, *changes)]
    said = [json.dumps(each.settings(), sort_keys=True) for each in made]
    assert [json.loads(text) for text in said] == [each.settings() for each in made]
    assert len(set(said)) == len(made), [changes[i - 1] for i, text in enumerate(said) if text in said[:i]]
    assert [pickle.loads(pickle.dumps(each)).settings() for each in made] == [each.settings() for each in made]


def test_equal_templates_are_equal_in_a_state() -> None:
    assert OwnTemplate(own_tokenizer()).settings() == OwnTemplate(own_tokenizer()).settings()

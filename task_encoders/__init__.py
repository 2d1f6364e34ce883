"""Encoders to use or copy, which turn samples into tensors, packs and batches.

ClassificationEncoder    an image and its class; MixUp and CutMix in batches
CaptioningEncoder        an image and its caption
ContrastiveEncoder       pairs of an image, or of a clip of a video, and a text
ChatEncoder              conversations with images, videos and audio; trains on the answers
InterleavedEncoder       documents with these between the texts
LanguageModelingEncoder  text; with a prompt before it, or without
SpeechEncoder            speech and its text

Their arguments are `Tokenizer`; for a single image `SquareCrop`; for speech `SpecAugment`; for images among text
`Vision`, with `NativeSize`, `Tiles`, `SplitTiles` or `Buckets`; for videos `VideoTokens` or `VideoFrames`, for audio
`AudioTokens`, for positions in time, height and width `MRope`; for conversations `ChatML` or `OwnTemplate`. `IGNORED`
is the label of tokens that do not contribute to the loss. `task_encoders.parts` has more parts for an encoder of your
own.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from task_encoders.captioning import CaptioningEncoder
    from task_encoders.chat import ChatEncoder
    from task_encoders.classification import ClassificationEncoder
    from task_encoders.contrastive import ContrastiveEncoder
    from task_encoders.interleaved import InterleavedEncoder
    from task_encoders.language_modeling import LanguageModelingEncoder
    from task_encoders.parts.audio_tokens import AudioTokens
    from task_encoders.parts.chat_template import ChatML, ChatTemplate, OwnTemplate
    from task_encoders.parts.data_formats import Message
    from task_encoders.parts.image_tiles import Buckets, ImageTiles, NativeSize, SplitTiles, Tiles
    from task_encoders.parts.medium import MRope
    from task_encoders.parts.square_crop import SquareCrop
    from task_encoders.parts.token_packing import IGNORED
    from task_encoders.parts.tokenizer import Tokenizer
    from task_encoders.parts.video_tokens import VideoFrames, VideoTokens
    from task_encoders.parts.vision import Vision
    from task_encoders.speech import SpecAugment, SpeechEncoder

__all__ = [
    "IGNORED",
    "AudioTokens",
    "Buckets",
    "CaptioningEncoder",
    "ChatEncoder",
    "ChatML",
    "ChatTemplate",
    "ClassificationEncoder",
    "ContrastiveEncoder",
    "ImageTiles",
    "InterleavedEncoder",
    "LanguageModelingEncoder",
    "MRope",
    "Message",
    "NativeSize",
    "OwnTemplate",
    "SpecAugment",
    "SpeechEncoder",
    "SplitTiles",
    "SquareCrop",
    "Tiles",
    "Tokenizer",
    "VideoFrames",
    "VideoTokens",
    "Vision",
]

_FILES = {
    "captioning": ["CaptioningEncoder"],
    "chat": ["ChatEncoder"],
    "classification": ["ClassificationEncoder"],
    "contrastive": ["ContrastiveEncoder"],
    "interleaved": ["InterleavedEncoder"],
    "language_modeling": ["LanguageModelingEncoder"],
    "speech": ["SpecAugment", "SpeechEncoder"],
    "parts.chat_template": ["ChatML", "ChatTemplate", "OwnTemplate"],
    "parts.data_formats": ["Message"],
    "parts.audio_tokens": ["AudioTokens"],
    "parts.image_tiles": ["Buckets", "ImageTiles", "NativeSize", "SplitTiles", "Tiles"],
    "parts.medium": ["MRope"],
    "parts.square_crop": ["SquareCrop"],
    "parts.token_packing": ["IGNORED"],
    "parts.tokenizer": ["Tokenizer"],
    "parts.video_tokens": ["VideoFrames", "VideoTokens"],
    "parts.vision": ["Vision"],
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is asked for: torch and torchvision take seconds."""
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)


def __dir__() -> list[str]:
    """The public names, also those not imported yet."""
    return __all__

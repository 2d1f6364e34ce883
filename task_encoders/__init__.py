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

from savable_pipeline.public_names import public_names

__all__, __getattr__ = public_names(__name__)


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__

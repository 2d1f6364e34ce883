"""Arrays of a batch that are sounds, as waveforms and spectrograms; and features of sounds, as pictures.

audio     float (clips, channels, samples)   samples from -1 to 1
features  float (sounds, bins, frames)       log-mel, as encoders make them; or (frames, bins) of all sounds
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline.tools.preview.image_entries import describe, stretched
from savable_pipeline.tools.preview.page import CardEntry, Sound
from savable_pipeline.tools.preview.room import Room
from savable_pipeline.tools.preview.sound_pictures import coloured, picture_of, spectrogram_pixels, waveform

_SOUNDS = ("audio", "sound", "wave", "speech")  # in the name of a field
_FEATURES = ("mel", "features", "spectrogram")
_BINS = (40, 64, 80, 96, 128)
_MOST_CHANNELS = 8
_LEAST_SAMPLES = 400
_MOST = 4  # sounds of a field
_MOST_SAMPLES = 480_000  # of a sound
_MOST_FRAMES = 3_000


def sound_entry(name: str, value: Any, array: NDArray[Any], room: Room) -> CardEntry | None:
    """None for an array that is neither."""
    if array.dtype.kind != "f" or not array.size or not 1 <= array.ndim <= 3:
        return None
    last = name.lower().rpartition(".")[2]
    if any(word in last for word in _FEATURES):
        return _features_entry(name, describe(value, array), array, room)
    if any(word in last for word in _SOUNDS) and array.shape[-1] >= _LEAST_SAMPLES:
        return _sounds_entry(name, describe(value, array), array, room)
    return None


def _sounds_entry(name: str, note: str, array: NDArray[Any], room: Room) -> CardEntry | None:
    sounds = array if array.ndim == 3 else array.reshape(-1, 1, array.shape[-1])  # two channels, or sounds: each alone
    if sounds.shape[1] > _MOST_CHANNELS:
        return None
    shown = [np.nan_to_num(sound[:, :_MOST_SAMPLES].mean(axis=0, dtype=np.float32)) for sound in sounds[:_MOST]]
    pictures = [
        Sound(waveform(samples), picture_of(spectrogram_pixels(samples), room), f"sound {number} of {len(sounds):,}")
        for number, samples in enumerate(shown)
    ]
    return CardEntry(name, note, sounds=pictures)


def _features_entry(name: str, note: str, array: NDArray[Any], room: Room) -> CardEntry | None:
    if array.ndim == 2 and array.shape[1] in _BINS:
        array = array.T[None]
    if array.ndim != 3 or array.shape[1] not in _BINS:
        return None
    shares = [stretched(each[:, :_MOST_FRAMES]) / 255 for each in array[:_MOST]]
    pictures = [
        Sound("", picture_of(coloured(each), room), f"sound {number} of {len(array):,}" if len(array) > 1 else "")
        for number, each in enumerate(shares)
    ]
    return CardEntry(name, note, sounds=pictures)

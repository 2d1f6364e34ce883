"""`SpeechEncoder`: speech and its text as log-mel features and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from savable_pipeline import Rng, Sample, Skip, TaskEncoder, empty
from task_encoders.parts.log_mel import HOP, RATE, log_mel
from task_encoders.parts.sample_parts import Field, named_part
from task_encoders.parts.token_packing import batch_documents, batch_tokens, document, is_packed, pack_tokens, pad_rows
from task_encoders.parts.tokenizer import Tokenize, Tokenizer, as_tokenizer


class SpeechEncoder(TaskEncoder):
    """Trains on the text of speech: features as in Whisper, and tokens.

    See Radford et al., 2022.

    Audio of any rate is resampled to 16 kHz, and its channels are averaged. A frame is 10 ms.

    Args:
        tokenizer: A function from text to token ids, an object with `encode(text)` as of Hugging Face, tiktoken or
            SentencePiece, or a `Tokenizer` to add special ids. None takes the UTF-8 bytes, 259 ids in all.
        text: The part that holds the text, or the field of a JSON part: "txt", "json[text]".
        audio: The part that has the speech. None (default): the first part that is audio or else video by its name.
        bins: The number of mel bands: 80 (default), or 128 for Whisper's large-v3.
        frames: The number of frames of each item, padded with silence: 3,000 for Whisper. None (default): as many as
            the speech has.
        min_s: Audio shorter than this many seconds is skipped (default 0.1).
        max_s: Audio longer than this many seconds is skipped (default 30).
        speeds: One of these speeds is drawn per sample and epoch, such as (0.9, 1.0, 1.1) (Ko et al., 2015).
        masks: Random masks of the features. None (default): none.
        eos: The end of a text, for a tokenizer that adds none: True for its own `eos_token`, a token as text or id,
            False for none. It is required where such a tokenizer has special tokens.

    An item has `features`, float32 (bins, F), `frames`, int, the number of frames before the padding, and
    `tokens` and `labels`, int64 (n,): a label is the next token, -100 after the last one. Its length is its frames. A
    batch of B items has

    - `features`, float32 (B, bins, F), padded with silence, and `frames`, int64 (B,);
    - `tokens`, `labels` and `position_ids`, int64 (B, T); `lengths`, int64 (B,), the number of tokens of each text.

    A batch of B packs has no `frames` and `lengths`, but

    - `frame_segments`, int64 (B, F), and `segments`, int64 (B, T): the index of the item in its row for each frame and
      token, and -1 for padding;
    - `cu_seqlens`, int32 (texts and paddings + 1,), the start of each among the B * T tokens, and `max_seqlen`, int.

    A sample is skipped as "no audio", as "no text" (missing or empty), as "too short" or as "too long".

    Raises:
        ValueError: A setting is out of its range, a field is not text, or the audio is damaged.
        JSONDecodeError: A part is not JSON.
        ImportError: PyAV is not installed.

    Example:
        ```python
        from task_encoders import SpeechEncoder
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        items = sp.Encode(sp.TarShardReader("speech/", lane), SpeechEncoder())
        batch = next(sp.Batcher(items, size=2))
        batch["features"].shape   # torch.Size([2, 80, 100])
        batch["frames"]           # tensor([100, 100])
        ```
    """

    global_rng = False

    def __init__(
        self,
        tokenizer: Tokenizer | Tokenize | None = None,
        *,
        text: str = "txt",
        audio: str | None = None,
        bins: int = 80,
        frames: int | None = None,
        min_s: float = 0.1,
        max_s: float = 30.0,
        speeds: Sequence[float] = (1.0,),
        masks: SpecAugment | None = None,
        eos: bool | int | str | None = None,
    ) -> None:
        if bins < 1 or not 0 < min_s <= max_s or not all(0.1 <= speed <= 10 for speed in speeds) or not speeds:
            raise ValueError(
                f"expected bins ≥ 1, 0 < min_s ≤ max_s, speeds in 0.1 … 10, found {bins}, {min_s}, {max_s}, {speeds}"
            )
        if frames is not None and frames * HOP < max_s * RATE:
            raise ValueError(f"frames={frames} have room for {frames * HOP / RATE} s, less than max_s={max_s}")
        self.tokenizer = as_tokenizer(tokenizer).ending(eos)
        self.text = Field(text)
        self.audio = audio
        self.bins, self.frames = bins, frames
        self.min_s, self.max_s = min_s, max_s
        self.speeds = tuple(speeds)
        self.masks = masks

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """Return one item, or `Skip`."""
        part = named_part(sample, self.audio, "audio", "video")
        if part is None:
            return Skip("no audio")
        tokens = self.tokenizer(self.text.read_text(sample) or "")
        if len(tokens) == 0:
            return Skip("no text")
        speed = rng.choice(self.speeds) if len(self.speeds) > 1 else self.speeds[0]
        with sample.audio(part) as audio:
            duration_s, rate = audio.duration_s, round(RATE / speed)
            if reason := self._skip_reason(_count_audio_samples(duration_s, rate)):
                return Skip(reason)
            waveform = audio.samples(0.0, duration_s, rate=rate, mono=True)[0]  # the only channel
        frames = -(-len(waveform) // HOP)
        features = log_mel(waveform, bins=self.bins, frames=self.frames or frames)
        if self.masks is not None:
            features[:, :frames] = self.masks(features[:, :frames], rng)
        return {"features": torch.from_numpy(features), "frames": frames, **document(tokens)}

    def length(self, item: dict[str, Any]) -> int:
        """Return the number of frames, 100 per second. Tokens do not count."""
        frames: int = item["frames"]
        return frames

    def length_of(self, sample: Sample) -> int | None:
        """Return the number of frames of a sample's item, from the header of its audio.

        The result is None if a speed is drawn, if the header does not have the duration, or if the sample is skipped.
        """
        part = named_part(sample, self.audio, "audio", "video")
        if part is None or len(self.speeds) > 1 or len(self.tokenizer(self.text.read_text(sample) or "")) == 0:
            return None
        header = sample.media(part)
        if header.duration_s is None or header.width is not None:  # a video's audio may have another duration
            return None
        audio_length = _count_audio_samples(header.duration_s, round(RATE / self.speeds[0]))
        return None if self._skip_reason(audio_length) else -(-audio_length // HOP)

    def pack(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build one pack of n items.

        It has `features`, float32 (bins, F), `frame_counts` of the items, and a pack of tokens.
        """
        return {
            "features": torch.cat([item["features"][:, : item["frames"]] for item in items], 1),
            "frame_counts": torch.tensor([item["frames"] for item in items]),
            **pack_tokens(items, pad=self.tokenizer.pad),
        }

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of B rows, from B packs or B items."""
        if not is_packed(items):
            frames = torch.tensor([item["frames"] for item in items])
            tokens = batch_documents(items, pad=self.tokenizer.pad)
            return {"features": _pad_features(items), "frames": frames, **tokens}
        packs = [item if "cu_seqlens" in item else self.pack([item], rng) for item in items]
        features = _pad_features(packs)
        text = batch_tokens(packs, pad=self.tokenizer.pad)
        return {
            "features": features,
            "frame_segments": _number_items([pack["frame_counts"] for pack in packs], features.shape[2]),
            "segments": _number_items([pack["cu_seqlens"].diff() for pack in packs], text["tokens"].shape[1]),
            **text,
        }

    def settings(self) -> dict[str, Any]:
        """Return every argument, and for the tokenizer its identity and special ids."""
        return {
            **self.tokenizer.settings(),
            "text": self.text.name,
            "audio": self.audio,
            "bins": self.bins,
            "frames": self.frames,
            "min_s": self.min_s,
            "max_s": self.max_s,
            "speeds": list(self.speeds),
            "masks": self.masks and self.masks.settings(),
        }

    def _skip_reason(self, audio_length: int) -> str:
        """Return the reason to skip audio of this length, in audio samples at 16 kHz, or ""."""
        seconds = audio_length / RATE
        return "too short" if seconds < self.min_s else "too long" if seconds > self.max_s else ""


def _count_audio_samples(duration_s: float, rate: int) -> int:
    """Return how many audio samples `Audio.samples` returns for a duration.

    Arithmetic with fractions makes `length_of` exact.
    """
    return round(Fraction(duration_s) * rate)


def _pad_features(rows: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Join the `features` of rows, float32 (bins, n), to float32 (rows, bins, longest), padded with their minimum."""
    features = [row["features"] for row in rows]
    padded = empty((len(rows), len(features[0]), max(own.shape[1] for own in features)), torch.float32)
    for padded_row, own in zip(padded, features, strict=True):
        padded_row[:, : own.shape[1]] = own
        padded_row[:, own.shape[1] :] = own.min()
    return padded


def _number_items(counts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Return the index in its row of the item of each element, -1 for padding: int64 (rows, length).

    `counts` has the elements of each item: 2 and 1, and in the next row 2, give 0 0 1 and 0 0 -1.
    """
    return pad_rows([torch.arange(len(row)).repeat_interleave(row) for row in counts], -1, length)


@dataclass(frozen=True)
class SpecAugment:
    """Masks bands and ranges of time with the mean of the features.

    See Park et al.: SpecAugment, 2019. The width of each mask is drawn first, and then its position. The defaults are
    those of the paper for LibriSpeech.

    Args:
        bands: The number of masks of mel bands (default 2).
        band_width: The greatest width of such a mask, in bands (default 27).
        times: The number of masks of time (default 2).
        time_width: The greatest length of such a mask, in frames of 10 ms (default 100).
        time_share: The greatest length of such a mask, as a fraction of all frames (default 1.0).

    Raises:
        ValueError: A setting is out of its range.

    Example:
        ```python
        import numpy as np
        from task_encoders import SpecAugment
        features = np.ones((80, 300), np.float32)
        features[:, 150:] = 0
        covered = SpecAugment()(features, sp.Rng(7))
        sorted(set(covered.ravel().tolist()))   # [0.0, 0.5, 1.0]
        ```
    """

    bands: int = 2
    band_width: int = 27
    times: int = 2
    time_width: int = 100
    time_share: float = 1.0

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0 or self.time_share > 1:
            raise ValueError(f"numbers and widths are at least 0, and a share at most 1, not {self}")

    def __call__(self, features: NDArray[np.float32], rng: Rng) -> NDArray[np.float32]:
        """Return a masked copy of the features, float32 (bands, frames).

        Args:
            features: float32 (bands, frames).
            rng: The encoder call's random numbers.
        """
        masked, mean = features.copy(), features.mean()
        bands, frames = features.shape
        for _ in range(self.bands):
            masked[_draw_range(bands, self.band_width, rng)] = mean
        for _ in range(self.times):
            masked[:, _draw_range(frames, min(self.time_width, int(self.time_share * frames)), rng)] = mean
        return masked

    def settings(self) -> dict[str, Any]:
        """Return every argument, for `TaskEncoder.settings`."""
        return asdict(self)


def _draw_range(count: int, widest: int, rng: Rng) -> slice:
    """Draw a range within 0 … count - 1 of at most `widest` numbers: first its width, then its start."""
    width = rng.integers(min(widest, count) + 1)
    start = rng.integers(count - width + 1)
    return slice(start, start + width)

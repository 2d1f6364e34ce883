"""`AudioTokens`: audio in a sequence of tokens, as in Qwen2-Audio, 25 per second.

16,000 samples ─ log_mel ─ 100 frames of 128 bands ─ 25 tokens      each of the model's two convolutions halves them
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch

from task_encoders.parts.log_mel import HOP, RATE, log_mel
from task_encoders.parts.medium import MediaHeader, Medium, MediumTokens, Unmeasured, element_rows

_SILENCE = 3  # frames added at the end, so that the last windows contain silence and not the mirrored audio


@dataclass(frozen=True)
class AudioTokens(Medium):
    """Audio as log-mel features, 100 frames per second, four of which are a token.

    Args:
        token: The id of each token of audio. Text must not contain it.
        text: The placeholder that a chat template writes for audio.
        before: The text before each audio, such as a special token.
        after: The text after each audio.
        bins: The number of mel bands (default 128).

    Raises:
        ValueError: `token` is not an id, `text` is empty, or `bins` is less than 1.

    Example:
        ```python
        from task_encoders import AudioTokens
        audio = AudioTokens(151646, before="<|audio_bos|>", after="<|audio_eos|>")
        [audio.tokens(frames) for frames in (100, 3_000)]   # [25, 750]
        ```
    """

    token: int
    text: str = "<audio>"
    before: str = ""
    after: str = ""
    bins: int = 128

    kind: ClassVar[str] = "audio"

    def __post_init__(self) -> None:
        self.check_token()
        if self.bins < 1:
            raise ValueError(f"AudioTokens: bins, the mel bands, must be at least 1, not {self.bins}")

    def tokens(self, frames: int) -> int:
        """Return the number of tokens of audio.

        A convolution and then a pooling halve the number of frames.

        Args:
            frames: The number of frames, 100 per second.
        """
        after_convolution = (frames - 1) // 2 + 1
        return (after_convolution - 2) // 2 + 1

    def tokenize(self, content: Any) -> MediumTokens:
        """Build the tokens and features of audio.

        Args:
            content: The audio, as `sample.audio()` opens it.

        Raises:
            ValueError: The audio is too short for a token.
        """
        samples = content.samples(0.0, content.duration_s, rate=RATE, mono=True)[0]
        frames = self._count_frames(len(samples))
        mels = log_mel(samples, bins=self.bins, frames=frames + _SILENCE)[:, :frames]
        fields = {"audio_mels": torch.from_numpy(np.ascontiguousarray(mels.T)), "audio_frames": torch.tensor([frames])}
        return MediumTokens(self, self.tokens(frames), fields)

    def measure(self, info: MediaHeader) -> MediumTokens:
        """Count the tokens from the duration, without features.

        Raises `Unmeasured` for a file with video, because its duration is the video's.
        """
        if info.duration_s is None or info.fps is not None:
            raise Unmeasured
        samples = round(Fraction(info.duration_s) * RATE)
        return MediumTokens(self, self.tokens(self._count_frames(samples)), {})

    def empty(self) -> dict[str, torch.Tensor]:
        """Return `audio_mels`, float32 (0, bins), and `audio_frames`, int64 (0,)."""
        mels = torch.empty(0, self.bins, dtype=torch.float32)
        return {"audio_mels": mels, "audio_frames": torch.empty(0, dtype=torch.int64)}

    def token_counts(self, item: dict[str, Any]) -> list[int]:
        """Count the tokens of each audio of an item."""
        return [self.tokens(frames) for frames in item["audio_frames"].tolist()]

    def select(self, item: dict[str, Any], first: int, last: int) -> dict[str, torch.Tensor]:
        """Return the fields of the audio parts `first` to `last - 1` of an item."""
        rows = element_rows(item["audio_frames"], first, last)
        return {"audio_mels": item["audio_mels"][rows], "audio_frames": item["audio_frames"][first:last]}

    def batch(self, joint: dict[str, torch.Tensor], counts: torch.Tensor) -> dict[str, Any]:
        """Return the fields of a batch.

        They are `audio_mels`, float32 (frames, bins); `audio_frames`, int64 (sounds,); `audio_counts`, int64 (B,), the
        number of audio parts of each row.
        """
        return {**joint, "audio_counts": counts}

    def settings(self) -> dict[str, Any]:
        """Return the class and every argument, for `TaskEncoder.settings`."""
        return {"class": "AudioTokens", **asdict(self)}

    def _count_frames(self, samples: int) -> int:
        """Return the number of frames of audio. Raises ValueError if they are too few for a token."""
        frames = -(-samples // HOP)
        if self.tokens(frames) < 1:
            raise ValueError(f"audio of {samples} samples at {RATE} Hz is too short for a token: at least 321")
        return frames

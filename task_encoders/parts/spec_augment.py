"""`SpecAugment`: bands and stretches of time in the features of speech, drawn at random and covered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from savable_pipeline import Rng


@dataclass(frozen=True)
class SpecAugment:
    """Covers bands and stretches of time with the mean of the features (Park et al.: SpecAugment, 2019).

    The width of each is drawn from 0 to its greatest, then its place. The defaults are the paper's for LibriSpeech.

    Args:
        bands: How many stretches of bands are covered.
        band_width: The greatest width of one, in bands.
        times: How many stretches of time are covered.
        time_width: The greatest length of one, in frames of 10 ms.
        time_share: And its greatest share of the frames.

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
        """Return the features covered, float32 (bands, frames) as they were.

        Args:
            features: float32 (bands, frames).
            rng: The random numbers of the call of the encoder.
        """
        covered, mean = features.copy(), features.mean()
        bands, frames = features.shape
        for _ in range(self.bands):
            covered[_drawn(bands, self.band_width, rng)] = mean
        for _ in range(self.times):
            covered[:, _drawn(frames, min(self.time_width, int(self.time_share * frames)), rng)] = mean
        return covered

    def settings(self) -> dict[str, Any]:
        """Every argument, for `TaskEncoder.settings`."""
        return asdict(self)


def _drawn(count: int, widest: int, rng: Rng) -> slice:
    width = rng.integers(min(widest, count) + 1)
    start = rng.integers(count - width + 1)
    return slice(start, start + width)

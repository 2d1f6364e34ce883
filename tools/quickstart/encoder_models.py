"""The small models of train_encoders.py: plain PyTorch, each from a batch to its loss. Nothing here loads data."""

from __future__ import annotations

from typing import Any

import torch
from models import VOCABULARY, Transformer
from torch import Tensor, nn
from torch.nn import functional


def image_tower(image_size: int, width: int) -> nn.Sequential:
    """A CNN: float32 (n, 3, size, size) to (n, width)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (image_size // 4) ** 2, width),
    )


class Classifier(nn.Module):
    """Which class an image is of; labels may be classes or, of mixed images, shares of them."""

    def __init__(self, *, image_size: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            image_tower(image_size, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, classes)
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The mean loss of an image, float32 ()."""
        return functional.cross_entropy(self.tower(batch["image"]), batch["label"])


class TwoTowers(nn.Module):
    """An image and its text should point the same way, others not; texts that are equal belong to the same images."""

    def __init__(self, *, image_size: int, longest_text: int, width: int = 96) -> None:
        super().__init__()
        self.look = image_tower(image_size, width)
        self.letter = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(longest_text, width)
        self.read = nn.GRU(width, width, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def see(self, batch: dict[str, Any]) -> Tensor:
        """The images, float32 (pairs, width)."""
        visual: Tensor = self.look(batch["image"])
        return visual

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The mean loss of a pair, both ways, float32 ()."""
        tokens, last = batch["tokens"], batch["lengths"] - 1
        read, _ = self.read(self.letter(tokens) + self.position.weight[: tokens.shape[1]])
        texts = functional.normalize(read[torch.arange(len(tokens)), last], dim=1)
        visual = functional.normalize(self.see(batch), dim=1)
        logits = self.scale.exp() * visual @ texts.T  # (pairs, pairs)
        equal = (tokens[:, None] == tokens[None, :]).all(-1).float()
        wanted = equal / equal.sum(1, keepdim=True)
        return (functional.cross_entropy(logits, wanted) + functional.cross_entropy(logits.T, wanted)) / 2


class WatchingTowers(TwoTowers):
    """The same of videos: what is seen in each frame, joined in order."""

    def __init__(self, *, frames: int, image_size: int, longest_text: int, width: int = 96) -> None:
        super().__init__(image_size=image_size, longest_text=longest_text, width=width)
        self.join = nn.Linear(frames * width, width)

    def see(self, batch: dict[str, Any]) -> Tensor:
        """The videos, float32 (pairs, width)."""
        each = self.look(batch["video"].flatten(0, 1)).unflatten(0, batch["video"].shape[:2])
        joined: Tensor = self.join(functional.relu(each).flatten(1))
        return joined


class Listener(nn.Module):
    """A speech recognizer: which word, or none, is said in each 40 ms (Graves et al.: CTC, 2006)."""

    def __init__(self, *, bins: int = 80, words: int, width: int = 96) -> None:
        super().__init__()
        self.nothing = words  # the number of what is none
        self.listen = nn.Sequential(
            nn.Conv1d(bins, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.order = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.tell = nn.Linear(2 * width, words + 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """The mean loss of a word, float32 ()."""
        heard, _ = self.order(self.listen(batch["features"]).transpose(1, 2))
        logs = functional.log_softmax(self.tell(heard), -1).transpose(0, 1)  # (F / 4, sounds, words + 1)
        steps = (batch["frames"] + 3) // 4
        return functional.ctc_loss(logs, batch["tokens"], steps, batch["lengths"], blank=self.nothing)


class SeeingTransformer(Transformer):
    """A language model in whose sequence images stand: each image token is `merge` × `merge` patches, projected."""

    def __init__(self, *, image_token: int, patch: int, merge: int, width: int = 96, **sizes: int) -> None:
        super().__init__(width=width, **sizes)
        self.image_token, self.merge = image_token, merge
        self.look = nn.Sequential(
            nn.Linear(3 * (patch * merge) ** 2, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """Tokens and places, and what is seen in the place of image tokens, float32 (rows, tokens, width)."""
        visual = torch.cat([self._merged(*tile) for tile in self._tiles(batch)])  # (image tokens, 3 × merge² × patch²)
        places = (batch["tokens"] == self.image_token).nonzero(as_tuple=True)
        return super().embed(batch).index_put(places, self.look(visual), accumulate=True)

    def _tiles(self, batch: dict[str, Any]) -> list[tuple[Tensor, list[int]]]:
        grids = batch["grids"].tolist()
        return list(zip(batch["patches"].split([rows * columns for rows, columns in grids]), grids, strict=True))

    def _merged(self, patches: Tensor, grid: list[int]) -> Tensor:
        """The patches of a tile, row by row, as its tokens, row by row."""
        rows, columns = (side // self.merge for side in grid)
        return patches.reshape(rows, self.merge, columns, -1).transpose(1, 2).reshape(rows * columns, -1)


class WatchingTransformer(Transformer):
    """A language model in whose sequence videos stand: each of their tokens is `token_pixels` numbers, projected."""

    def __init__(self, *, video_token: int, token_pixels: int, width: int = 96, **sizes: int) -> None:
        super().__init__(width=width, **sizes)
        self.video_token, self.token_pixels = video_token, token_pixels
        self.look = nn.Sequential(nn.Linear(token_pixels, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """Tokens and places, and what is seen in the place of video tokens, float32 (rows, tokens, width)."""
        visual = batch["video_patches"].reshape(-1, self.token_pixels)  # the patches of a token follow each other
        places = (batch["tokens"] == self.video_token).nonzero(as_tuple=True)
        return super().embed(batch).index_put(places, self.look(visual), accumulate=True)

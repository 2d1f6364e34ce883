"""The small models of train_encoders.py, in plain PyTorch. Each returns the loss of a batch."""

from __future__ import annotations

from typing import Any

import torch
from models import VOCABULARY, Transformer
from torch import Tensor, nn
from torch.nn import functional


def image_tower(image_size: int, width: int) -> nn.Sequential:
    """Build a CNN from float32 (n, 3, size, size) to (n, width)."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * (image_size // 4) ** 2, width),
    )


class Classifier(nn.Module):
    """Image classifier. Labels are classes or, for mixed images, probabilities of classes."""

    def __init__(self, *, image_size: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            image_tower(image_size, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, classes)
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss per image, float32 ()."""
        return functional.cross_entropy(self.tower(batch["image"]), batch["label"])


class TwoTowers(nn.Module):
    """Contrastive model of images and texts. Equal texts belong to all images that have one of them."""

    def __init__(self, *, image_size: int, longest_text: int, width: int = 96) -> None:
        super().__init__()
        self.image_layers = image_tower(image_size, width)
        self.letter = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(longest_text, width)
        self.text_layers = nn.GRU(width, width, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def embed_visual(self, batch: dict[str, Any]) -> Tensor:
        """Embed the images, float32 (pairs, width)."""
        embedded: Tensor = self.image_layers(batch["image"])
        return embedded

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss per pair, of images to texts and of texts to images, float32 ()."""
        tokens, last = batch["tokens"], batch["lengths"] - 1
        outputs, _ = self.text_layers(self.letter(tokens) + self.position.weight[: tokens.shape[1]])
        texts = functional.normalize(outputs[torch.arange(len(tokens)), last], dim=1)
        visual = functional.normalize(self.embed_visual(batch), dim=1)
        logits = self.scale.exp() * visual @ texts.T  # (pairs, pairs)
        has_equal_text = (tokens[:, None] == tokens[None, :]).all(-1).float()
        targets = has_equal_text / has_equal_text.sum(1, keepdim=True)
        return (functional.cross_entropy(logits, targets) + functional.cross_entropy(logits.T, targets)) / 2


class WatchingTowers(TwoTowers):
    """Contrastive model of videos and texts. A linear layer joins the embeddings of a video's frames."""

    def __init__(self, *, frames: int, image_size: int, longest_text: int, width: int = 96) -> None:
        super().__init__(image_size=image_size, longest_text=longest_text, width=width)
        self.join = nn.Linear(frames * width, width)

    def embed_visual(self, batch: dict[str, Any]) -> Tensor:
        """Embed the videos, float32 (pairs, width)."""
        frames = self.image_layers(batch["video"].flatten(0, 1)).unflatten(0, batch["video"].shape[:2])
        joined: Tensor = self.join(functional.relu(frames).flatten(1))
        return joined


class Listener(nn.Module):
    """Speech recognizer that predicts one word or none for each 40 ms, trained by CTC (Graves et al., 2006)."""

    def __init__(self, *, bins: int = 80, words: int, width: int = 96) -> None:
        super().__init__()
        self.blank = words  # the class of no word
        self.audio_layers = nn.Sequential(
            nn.Conv1d(bins, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.sequence_layers = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.predict = nn.Linear(2 * width, words + 1)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss per word, float32 ()."""
        outputs, _ = self.sequence_layers(self.audio_layers(batch["features"]).transpose(1, 2))
        logs = functional.log_softmax(self.predict(outputs), -1).transpose(0, 1)  # (F / 4, sounds, words + 1)
        steps = (batch["frames"] + 3) // 4  # two convolutions with stride 2
        return functional.ctc_loss(logs, batch["tokens"], steps, batch["lengths"], blank=self.blank)


class SeeingTransformer(Transformer):
    """Language model with images in its sequence. An image token is a projection of `merge` × `merge` patches."""

    def __init__(self, *, image_token: int, patch: int, merge: int, width: int = 96, **sizes: int) -> None:
        super().__init__(width=width, **sizes)
        self.image_token, self.merge = image_token, merge
        self.image_layers = nn.Sequential(
            nn.Linear(3 * (patch * merge) ** 2, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """Return the input embeddings, with those of patches added at image tokens, float32 (rows, tokens, width)."""
        tiles = [self._group_by_token(*tile) for tile in self._split_tiles(batch)]
        visual = torch.cat(tiles)  # (image tokens, 3 × merge² × patch²)
        positions = (batch["tokens"] == self.image_token).nonzero(as_tuple=True)
        return super().embed(batch).index_put(positions, self.image_layers(visual), accumulate=True)

    def _split_tiles(self, batch: dict[str, Any]) -> list[tuple[Tensor, list[int]]]:
        grids = batch["grids"].tolist()
        return list(zip(batch["patches"].split([rows * columns for rows, columns in grids]), grids, strict=True))

    def _group_by_token(self, patches: Tensor, grid: list[int]) -> Tensor:
        """Group the patches of a tile by token. Both are in row order."""
        rows, columns = (side // self.merge for side in grid)
        return patches.reshape(rows, self.merge, columns, -1).transpose(1, 2).reshape(rows * columns, -1)


class WatchingTransformer(Transformer):
    """Language model with videos in its sequence. A video token is a projection of `token_pixels` numbers."""

    def __init__(self, *, video_token: int, token_pixels: int, width: int = 96, **sizes: int) -> None:
        super().__init__(width=width, **sizes)
        self.video_token, self.token_pixels = video_token, token_pixels
        self.image_layers = nn.Sequential(nn.Linear(token_pixels, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def embed(self, batch: dict[str, Any]) -> Tensor:
        """Return the input embeddings, with those of patches added at video tokens, float32 (rows, tokens, width)."""
        visual = batch["video_patches"].reshape(-1, self.token_pixels)  # the patches of a token are adjacent
        positions = (batch["tokens"] == self.video_token).nonzero(as_tuple=True)
        return super().embed(batch).index_put(positions, self.image_layers(visual), accumulate=True)

"""`ClassificationEncoder`: an image and its class; batches mixed by MixUp and CutMix where that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import one_hot
from torchvision.transforms import v2

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.field import Field
from task_encoders.square_crop import SquareCrop


class ClassificationEncoder(TaskEncoder):
    """Predicts which of `classes` an image shows.

    `label` is the part or field that holds the class, as its number or, where `names` are given, its name: "cls",
    "json[label]". With `mixup` or `cutmix`, the parameter α of their Beta distribution, each batch is mixed by one
    of the two, drawn anew (Zhang et al.: mixup, 2018; Yun et al.: CutMix, 2019), and labels are shares of classes.
    """

    def __init__(
        self,
        classes: int,
        *,
        label: str = "cls",
        names: tuple[str, ...] = (),
        crop: SquareCrop | None = None,
        mixup: float = 0.0,
        cutmix: float = 0.0,
    ) -> None:
        if classes < 1 or mixup < 0 or cutmix < 0:
            raise ValueError(f"classes is at least 1, mixup and cutmix at least 0, not {classes}, {mixup}, {cutmix}")
        if names and len(names) != classes:
            raise ValueError(f"names has {len(names)} names for {classes} classes")
        self.classes = classes
        self.label = Field(label)
        self.names = names
        self.crop = crop or SquareCrop()
        self.alphas = {"mixup": mixup, "cutmix": cutmix}
        self.global_rng = ("torch",) if mixup or cutmix else self.crop.global_rng
        chosen = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
        chosen += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
        self._mix = v2.RandomChoice(chosen) if chosen else None

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """One item: `image`, uint8 (3, size, size); `label`, int.

        Skips a sample without an image as "no image", one without a class as "no cls" (or what `label` is). Raises
        ValueError that names the field where the class is none of the classes.
        """
        image = self.crop.image(sample)
        if image is None:
            return Skip("no image")
        value = self.label.read(sample)
        if value is None:
            return Skip(f"no {self.label.name}")
        return {"image": image, "label": self._number(value)}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """`image`, float32 (B, 3, size, size), normalized; `label`, int64 (B,), or mixed, float32 (B, classes)."""
        image = self.crop.normalize(torch.stack([item["image"] for item in items]))
        label = torch.tensor([item["label"] for item in items])
        if self._mix is None:
            return {"image": image, "label": label}
        image, label = self._mix(image, label) if len(items) > 1 else (image, one_hot(label, self.classes).float())
        return {"image": image, "label": label}

    def settings(self) -> dict[str, Any]:
        """Every argument."""
        own = {"classes": self.classes, "label": self.label.name, "names": list(self.names), **self.alphas}
        return {**self.crop.settings(), **own}

    def _number(self, value: Any) -> int:
        text = str(value).strip()
        if self.names:
            if text in self.names:
                return self.names.index(text)
            raise ValueError(f"{self.label.name}: expected one of {', '.join(self.names)}, found {value!r}")
        if not isinstance(value, bool) and text.isdecimal() and int(text) < self.classes:
            return int(text)
        raise ValueError(f"{self.label.name}: expected a class from 0 to {self.classes - 1}, found {value!r}")

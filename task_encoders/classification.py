"""`ClassificationEncoder`: an image and its class, with optional MixUp and CutMix."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import one_hot

from savable_pipeline import Rng, Sample, Skip, TaskEncoder
from task_encoders.parts.sample_parts import Field
from task_encoders.parts.square_crop import SquareCrop


class ClassificationEncoder(TaskEncoder):
    """Predicts the class of an image.

    Args:
        classes: The number of classes.
        label: The part that has the class, or the field of a JSON part: "cls" (default), "json[label]".
        names: The names of the classes in order, if labels are names. () (default): labels are numbers from 0.
        crop: The size and augmentation of the images. None (default): `SquareCrop()`.
        mixup: The parameter α of MixUp's Beta distribution (Zhang et al., 2018). 0 (default): no MixUp.
        cutmix: The parameter α of CutMix (Yun et al., 2019), 0 by default. With both, one is drawn per batch.

    An item has `image`, uint8 (3, size, size), and `label`, int. A batch of B items has `image`, float32 (B, 3, size,
    size), normalized, and `label`, int64 (B,). In a mixed batch, it is the probability of each class, float32 (B,
    classes).

    A sample is skipped as "no image", or as "no cls" (the name of `label`).

    Raises:
        ValueError: A setting is out of its range, or a label is not one of the classes.
        JSONDecodeError: A part is not JSON.
        OSError: An image is damaged.

    Example:
        ```python
        from task_encoders import ClassificationEncoder, SquareCrop
        lane = sp.Lane()  # to inspect batches; a loader calls a pipeline function with its own lanes
        samples = sp.TarShardReader("shards/", lane)
        encoder = ClassificationEncoder(10, crop=SquareCrop(32), mixup=0.2)
        batch = next(sp.Batcher(sp.Encode(samples, encoder), size=4))
        batch["image"].shape    # torch.Size([4, 3, 32, 32])
        batch["label"].sum(1)   # tensor([1., 1., 1., 1.])
        ```
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
            raise ValueError(f"classes must be at least 1, mixup and cutmix at least 0: {classes}, {mixup}, {cutmix}")
        if names and len(names) != classes:
            raise ValueError(f"names has {len(names)} names for {classes} classes")
        self.classes = classes
        self.label = Field(label)
        self.names = names
        self.crop = crop or SquareCrop()
        self.alphas = {"mixup": mixup, "cutmix": cutmix}
        self.global_rng = ("torch",) if mixup or cutmix else False
        self._mix = _mix_transform(classes, mixup, cutmix) if mixup or cutmix else None

    def encode(self, sample: Sample, rng: Rng) -> dict[str, Any] | Skip:
        """Return one item, or `Skip`."""
        image = self.crop.image(sample, rng)
        if image is None:
            return Skip("no image")
        value = self.label.read(sample)
        if value is None:
            return Skip(f"no {self.label.name}")
        return {"image": image, "label": self._class_index(value)}

    def batch(self, items: list[dict[str, Any]], rng: Rng) -> dict[str, Any]:
        """Build a batch of B items, mixed if `mixup` or `cutmix` is set."""
        image = self.crop.normalize(torch.stack([item["image"] for item in items]))
        label = torch.tensor([item["label"] for item in items])
        if self._mix is None:
            return {"image": image, "label": label}
        # a single image has no other one to mix with
        image, label = self._mix(image, label) if len(items) > 1 else (image, one_hot(label, self.classes).float())
        return {"image": image, "label": label}

    def settings(self) -> dict[str, Any]:
        """Return every argument."""
        own = {"classes": self.classes, "label": self.label.name, "names": list(self.names), **self.alphas}
        return {**self.crop.settings(), **own}

    def _class_index(self, value: Any) -> int:
        """Return the index of a sample's class. Raises ValueError if the value is not one of the classes."""
        text = str(value).strip()
        if self.names:
            if text in self.names:
                return self.names.index(text)
            raise ValueError(f"{self.label.name}: expected one of {', '.join(self.names)}, found {value!r}")
        if not isinstance(value, bool) and text.isdecimal() and int(text) < self.classes:
            return int(text)
        raise ValueError(f"{self.label.name}: expected a class from 0 to {self.classes - 1}, found {value!r}")


def _mix_transform(classes: int, mixup: float, cutmix: float) -> Any:
    """Return MixUp, CutMix, or a random choice of the two for each batch."""
    from torchvision.transforms import v2  # this takes a second, so it is imported only if batches are mixed

    transforms = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    transforms += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    return v2.RandomChoice(transforms)

"""What an encoder reads of a sample: a value, by `Field`, and the images to which a document or a conversation refers.

`txt` is a part, `json[caption]` a field of a JSON part; images go by the name of their part, or in order.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable
from typing import Any

from PIL import Image

from savable_pipeline import IMAGE_PARTS, Sample
from task_encoders.parts.scaled_image import ScaledImage

SeenImage = Image.Image | ScaledImage
_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


class Field:
    """A part of a sample as text, or a field of a part as JSON: `json[meta][labels][0]`.

    The notation is that of Megatron-Energon's field maps.
    """

    def __init__(self, name: str) -> None:
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise ValueError(f"a field is a part, such as txt, or a field of one, such as json[caption], not {name!r}")
        self.name = name
        self.part = matched[1]
        self.path = re.findall(r"\[([^\[\]]+)\]", matched[2])

    def read(self, sample: Sample) -> Any:
        """The value; None where the sample has none.

        Raises UnicodeDecodeError and JSONDecodeError where a part cannot be decoded, ValueError where a step of the
        path finds neither an object nor a list.
        """
        if self.part not in sample:
            return None
        if not self.path:
            return sample.text(self.part)
        value = sample.json(self.part)
        for step in self.path:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and step.isdecimal():
                value = value[int(step)] if int(step) < len(value) else None
            elif value is not None:
                raise ValueError(f"{self.name}: [{step}] expects an object, found {type(value).__name__}")
        return value

    def read_text(self, sample: Sample) -> str | None:
        """The value, None where the sample has none. Raises ValueError where it is no text."""
        value = self.read(sample)
        if value is None or isinstance(value, str):
            return value
        raise ValueError(f"{self.name}: expected text, found {type(value).__name__} {value!r:.80}")


def named_part(sample: Sample, name: str | None, known: tuple[str, ...]) -> str | None:
    """The part `name`, or without a name the first of the `known` ones; None where the sample does not have it."""
    return next((part for part in ((name,) if name else known) if part in sample), None)


_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")  # of an image in a data URL; none that runs a program


class SampleImages:
    """The image parts of a sample, `jpg` or `0.jpg`, `1.png`, …, sorted by the numbers in their names.

    The text must use each at least once: `check_all_used` raises if one is left over. `read` decodes one.
    """

    def __init__(self, sample: Sample, read: Callable[[Sample, str], SeenImage] = Sample.image) -> None:
        self._sample = sample
        self._read = read
        self.names = sorted((name for name in sample if name.lower().rpartition(".")[2] in IMAGE_PARTS), key=_numbered)
        self._used: dict[str, None] = {}

    def next(self, field: str) -> SeenImage:
        """The first image not yet used. Raises ValueError that names `field`, which asks for it."""
        for name in self.names:
            if name not in self._used:
                return self.named(name, field)
        raise ValueError(f"{field}: a place for image {len(self._used) + 1}, but the sample has {self._described()}")

    def named(self, name: str, field: str) -> SeenImage:
        """The image in this part; or in a `data:` URL. Raises ValueError that names `field`, and what Pillow raises."""
        if name.startswith("data:"):
            return _from_data_url(name, field)
        for known in self.names:
            if known.lower() == name.lower():
                self._used[known] = None
                return self._read(self._sample, known)
        hint = "; nothing is downloaded: store the image beside the text" if "://" in name else ""
        raise ValueError(f"{field}: no image {name!r:.80}, the sample has {self._described()}{hint}")

    def check_all_used(self) -> None:
        """Raises ValueError that names the first image which no field asked for."""
        for name in self.names:
            if name not in self._used:
                raise ValueError(f"image {name} has no place in the text: {len(self._used)} of {len(self.names)} have")

    def _described(self) -> str:
        return ", ".join(self.names) if self.names else "no image"


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts 2.jpg before 10.jpg."""
    return [(int(digits or 0), other) for digits, other in re.findall(r"([0-9]+)|([^0-9]+)", name)]


def _from_data_url(url: str, field: str) -> Image.Image:
    head, comma, encoded = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("no base64")
        raw = base64.b64decode(encoded, validate=True)
        image = Image.open(io.BytesIO(raw), formats=_FORMATS)
        if "A" not in image.getbands() and "transparency" not in image.info:
            return image.convert("RGB")
        canvas = Image.new(
            "RGBA", image.size, "white"
        )  # as `Sample.image` does: transparent pixels would show their colour
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    except (binascii.Error, ValueError, OSError) as error:
        raise ValueError(f"{field}: no image can be read from {url[:40]!r}… ({error})") from error

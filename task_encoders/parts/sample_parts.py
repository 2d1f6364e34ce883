"""What an encoder reads of a sample: a value, by `Field`, and the images, videos and sounds to which a text refers.

`txt` is a part, `json[caption]` a field of a JSON part; images go by the name of their part, or in order.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from PIL import Image, ImageOps

from savable_pipeline import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS, Sample
from task_encoders.parts.scaled_image import ScaledImage

SeenImage = Image.Image | ScaledImage
ReadImage = Callable[[Sample, str], SeenImage]
KINDS = {"image": IMAGE_PARTS, "video": VIDEO_PARTS, "audio": AUDIO_PARTS}
Seen = TypeVar("Seen")
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


@dataclass(frozen=True)
class MediaPart:
    """A video or a sound of a sample, which is opened when it is due.

    Args:
        kind: "video" or "audio".
        name: The name of its part.
        text: What a chat template writes in its place.
    """

    kind: str
    name: str
    text: str


def kind_of(part: SeenImage | MediaPart) -> str:
    """What this is: "image", "video" or "audio"."""
    return part.kind if isinstance(part, MediaPart) else "image"


class PartsOfKind(Generic[Seen]):
    """The parts of a sample that are images, `jpg` or `0.jpg`, `1.png`, …, or videos, or sounds, by their numbers.

    The text must use each at least once: `check_all_used` raises if one is left over. `read` makes of a part what
    stands in the text.
    """

    def __init__(self, sample: Sample, kind: str, read: Callable[[str], Seen]) -> None:
        self._kind = kind
        self._read = read
        self.names = sorted((name for name in sample if name.lower().rpartition(".")[2] in KINDS[kind]), key=_numbered)
        self._used: dict[str, None] = {}

    def next(self, field: str) -> Seen:
        """The first one not yet used. Raises ValueError that names `field`, which asks for it."""
        for name in self.names:
            if name not in self._used:
                return self.named(name, field)
        number = len(self._used) + 1
        raise ValueError(f"{field}: a place for {self._kind} {number}, but the sample has {self._described()}")

    def named(self, name: str, field: str) -> Seen:
        """The one in this part. Raises ValueError that names `field`, and what `read` raises."""
        for known in self.names:
            if known.lower() == name.lower():
                self._used[known] = None
                return self._read(known)
        hint = f"; nothing is downloaded: store the {self._kind} beside the text" if "://" in name else ""
        raise ValueError(f"{field}: no {self._kind} {name!r:.80}, the sample has {self._described()}{hint}")

    def check_all_used(self) -> None:
        """Raises ValueError that names the first one which no field asked for."""
        for name in self.names:
            if name not in self._used:
                of = f"{len(self._used)} of {len(self.names)}"
                raise ValueError(f"{self._kind} {name} has no place in the text: {of} have")

    def _described(self) -> str:
        return ", ".join(self.names) if self.names else f"no {self._kind}"


class SampleImages(PartsOfKind[SeenImage]):
    """The images of a sample; one may also be in the text, as a `data:` URL, turned with `exif`. `read` decodes one."""

    def __init__(self, sample: Sample, read: ReadImage = Sample.image, *, exif: bool = True) -> None:
        super().__init__(sample, "image", lambda name: read(sample, name))
        self._exif = exif

    def named(self, name: str, field: str) -> SeenImage:
        """The image in this part; or in a `data:` URL. Raises ValueError that names `field`, and what Pillow raises."""
        return _from_data_url(name, field, self._exif) if name.startswith("data:") else super().named(name, field)


class SampleMedia:
    """The images of a sample, and of its videos and sounds those for which there is a text to write in their place."""

    def __init__(self, images: SampleImages, sample: Sample | None = None, **texts: str) -> None:
        self.images = images
        self._others = {kind: _media_parts(sample, kind, text) for kind, text in texts.items() if sample is not None}

    @property
    def kinds(self) -> list[str]:
        """The kinds for which text has places: "image", and "video" or "audio"."""
        return ["image", *self._others]

    def of(self, kind: str, field: str) -> PartsOfKind[SeenImage] | PartsOfKind[MediaPart]:
        """Those of one kind. Raises ValueError that names `field`, which asks for it, where the encoder takes none."""
        if kind == "image":
            return self.images
        if kind not in self._others:
            raise ValueError(f"{field}: a place for {kind}, but the encoder takes none: give it {kind}=")
        return self._others[kind]

    def check_all_used(self) -> None:
        """Raises ValueError that names the first one which no field asked for."""
        for kind in self.kinds:
            self.of(kind, kind).check_all_used()


def _media_parts(sample: Sample, kind: str, text: str) -> PartsOfKind[MediaPart]:
    return PartsOfKind(sample, kind, lambda name: MediaPart(kind, name, text))


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts 2.jpg before 10.jpg."""
    return [(int(digits or 0), other) for digits, other in re.findall(r"([0-9]+)|([^0-9]+)", name)]


def _from_data_url(url: str, field: str, exif: bool) -> Image.Image:
    head, comma, encoded = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("no base64")
        raw = base64.b64decode(encoded, validate=True)
        image: Image.Image = Image.open(io.BytesIO(raw), formats=_FORMATS)
        image = ImageOps.exif_transpose(image) if exif else image
        if "A" not in image.getbands() and "transparency" not in image.info:
            return image.convert("RGB")
        canvas = Image.new(
            "RGBA", image.size, "white"
        )  # as `Sample.image` does: transparent pixels would show their colour
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    except (binascii.Error, ValueError, OSError) as error:
        raise ValueError(f"{field}: no image can be read from {url[:40]!r}… ({error})") from error

"""Parts of a sample that an encoder reads: a `Field`, images, videos and audio.

`txt` is a part, `json[caption]` a field of a JSON part; images go by the name of their part, or in order.

A JPEG of 4000 × 3000 that becomes 500 × 375 or less is decoded at an eighth, in a third of the time: a `ScaledImage`.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from PIL import Image, ImageOps

from savable_pipeline import Sample

Decode = Literal["scaled", "exact"]


@dataclass(frozen=True)
class ScaledImage:
    """Image of `width` × `height` pixels, decoded at a smaller size.

    Args:
        width: Width of the full image, in pixels.
        height: Its height.
        pixels: RGB; the full image takes the place `info["box"]` in it, as `Sample.image` says.
    """

    width: int
    height: int
    pixels: Image.Image

    def resize(
        self,
        size: tuple[int, int],
        resample: Image.Resampling,
        box: tuple[float, float, float, float] | None = None,
    ) -> Image.Image:
        """Resize a region of the full image, as Pillow does.

        `box` is the region. None: all of it.
        """
        first, top, end, bottom = whole = self.pixels.info["box"]  # of a mirrored photo it begins within a pixel
        if box is None:
            return self.pixels.resize(size, resample, box=whole)
        across, down = (end - first) / self.width, (bottom - top) / self.height
        left, upper, right, lower = box
        scaled = (first + left * across, top + upper * down, first + right * across, top + lower * down)
        return self.pixels.resize(size, resample, box=scaled)


def check_decode(decode: str) -> None:
    """Raise ValueError unless this is one of the two settings."""
    if decode not in ("scaled", "exact"):
        raise ValueError(f"decode must be 'scaled' or 'exact', not {decode!r}")


DecodedImage = Image.Image | ScaledImage
ReadImage = Callable[[Sample, str], DecodedImage]
Opened = TypeVar("Opened")
_NAME = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")


class Field:
    """Part of a sample as text, or field of a JSON part: `json[meta][labels][0]`.

    The notation is that of Megatron-Energon's field maps.
    """

    def __init__(self, name: str) -> None:
        matched = _NAME.fullmatch(name)
        if matched is None:
            raise ValueError(
                f"invalid field {name!r}. Name a part, such as txt, or a field of one, such as json[caption]"
            )
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
        """Return the value as text, or None if the sample has none.

        Raises ValueError if it is no text.
        """
        value = self.read(sample)
        if isinstance(value, str) and not self.path:
            value = self._field_of_line(sample, value)
        if value is None or isinstance(value, str):
            return value
        raise ValueError(f"{self.name}: expected text, found {type(value).__name__} {value!r:.80}")

    def _field_of_line(self, sample: Sample, text: str) -> Any:
        """A part's text; or the value of which it is the JSON, in a line such as {"text": ["x"]}."""
        if "json" not in sample or self.part == "json" or text[:1] not in "[{-0123456789tf":
            return text
        try:
            value = json.loads(text)
        except ValueError:
            return text
        record = sample.json("json")
        return value if isinstance(record, dict) and record.get(self.part) == value else text


def named_part(sample: Sample, name: str | None, *kinds: str) -> str | None:
    """Return the part `name`, or without a name the first of these kinds.

    It is None if the sample does not have it.
    """
    return next((part for kind in kinds for part in ((name,) if name else Sample.KINDS[kind]) if part in sample), None)


_BEGINS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
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


ShownMedia = DecodedImage | MediaPart


def media_kind(part: ShownMedia) -> str:
    """Return "image", "video" or "audio"."""
    return part.kind if isinstance(part, MediaPart) else "image"


class PartsOfKind(Generic[Opened]):
    """Parts of a sample that are images, or videos, or audio, by number.

    Images are `jpg`, or `0.jpg`, `1.png`, ….

    The text must use each at least once, or `check_all_used` raises. `read` opens a part by its name.
    """

    def __init__(self, sample: Sample, kind: str, read: Callable[[str], Opened]) -> None:
        self._kind = kind
        self._read = read
        self.names = sorted([n for n in sample if n.lower().rpartition(".")[2] in Sample.KINDS[kind]], key=_numbered)
        if not self.names and kind in sample and _is_image(sample, kind):  # a column of bytes
            self.names = [kind]
        self._due = list(self.names)  # a name that is listed twice is due twice
        self._used = 0

    def next(self, field: str) -> Opened:
        """Return the first one that is not used yet.

        Raises ValueError that names `field`, which refers to it.
        """
        if self._due:
            return self.named(self._due[0], field)
        raise ValueError(
            f"{field}: a place for {self._kind} {self._used + 1}, but the sample has {self._described()}{self._hint}"
        )

    def numbered(self, index: int, field: str) -> Opened:
        """Return the one with this index.

        Raises ValueError that names `field`, which refers to it.
        """
        if not 0 <= index < len(self.names):
            raise ValueError(f"{field}: {index}, but the sample has {self._described()}{self._hint}")
        return self.named(self.names[index], field)

    def known(self, address: Any) -> str | None:
        """Return the part name or `data:` URL that an address in a text means, or None."""
        if isinstance(address, dict):  # as a table has an image within a list: its bytes in base64
            inside = address.get("bytes")
            address = f"data:;base64,{inside}" if isinstance(inside, str) else address.get("url") or address.get("path")
        if not isinstance(address, str) or address.startswith("data:"):
            return address if isinstance(address, str) and self._kind == "image" else None
        return next((name for name in self.names if name.lower() == address.lower()), None)

    def order_by(self, listed: Any) -> None:
        """Order them as a list of their names, if each is known.

        Paths mean the parts in their order.
        """
        found = [self.known(address) for address in (listed if isinstance(listed, list) else [listed])]
        if None not in found:
            listed_ones = [name for name in found if name is not None]
            self.names = [*listed_ones, *(name for name in self.names if name not in listed_ones)]
            self._due = list(self.names)

    def check_any(self, listed: Any, field: str) -> None:
        """Raise ValueError that names `field` if it lists some but the sample has none."""
        if listed and not self.names:
            raise ValueError(f"{field}: {listed!r:.80}, but the sample has {self._described()}{self._hint}")

    def unplaced(self) -> list[Opened]:
        """All of them, where none has a place; else none."""
        return [] if self._used else [self.named(name, name) for name in self.names]

    def take(self, name: str) -> None:
        """Count one as used."""
        self._used += 1
        if name in self._due:
            self._due.remove(name)

    def named(self, name: str, field: str) -> Opened:
        """Return the one in this part.

        Raises ValueError that names `field`, and what `read` raises.
        """
        for known in self.names:
            if known.lower() == name.lower():
                self.take(known)
                return self._read(known)
        hint = self._hint or (
            f". Nothing is downloaded: store the {self._kind} beside the text" if "://" in name else ""
        )
        raise ValueError(f"{field}: no {self._kind} {name!r:.80}, the sample has {self._described()}{hint}")

    def check_all_used(self) -> None:
        """Raise ValueError that names the first one that no field refers to."""
        if self._due:
            of = f"{len(self.names) - len(self._due)} of {len(self.names)}"
            raise ValueError(f"{self._kind} {self._due[0]} has no place in the text: {of} have")

    @property
    def _hint(self) -> str:
        """What to do where a record names files by their paths."""
        if self.names:
            return ""
        command = f"`savable convert SRC DST --file-field {self._kind}s`"
        return f"; no file is opened that a text names: {command} stores those of a field beside the text"

    def _described(self) -> str:
        return ", ".join(name[:40] for name in self.names) if self.names else f"no {self._kind}"


class SampleImages(PartsOfKind[DecodedImage]):
    """Images of a sample, which may also be `data:` URLs in the text.

    `read` decodes one. With `exif`, those in the text are rotated.
    """

    def __init__(self, sample: Sample, read: ReadImage = Sample.image, *, exif: bool = True) -> None:
        super().__init__(sample, "image", lambda name: read(sample, name))
        self._exif = exif

    def named(self, name: str, field: str) -> DecodedImage:
        """Return the image in this part or `data:` URL.

        Raises ValueError that names `field`, and what Pillow raises.
        """
        if not name.startswith("data:"):
            return super().named(name, field)
        if name in self.names:
            self.take(name)
        return _from_data_url(name, field, self._exif)


class SampleMedia:
    """Images of a sample, and its videos and audio if text can refer to them.

    `texts` has the text that a template writes for each kind.
    """

    def __init__(self, images: SampleImages, sample: Sample | None = None, *, sees: bool = True, **texts: str) -> None:
        self.images = images
        self._sees = sees
        self._others = {kind: _media_parts(sample, kind, text) for kind, text in texts.items() if sample is not None}

    @property
    def kinds(self) -> list[str]:
        """Kinds to which text may refer: "image", "video", "audio"."""
        return ["image", *self._others]

    @property
    def shown_kinds(self) -> list[str]:
        """These kinds, without "image" if the encoder takes none and the sample has none.

        `<image>` is then text, as in SVG.
        """
        return self.kinds if self._sees or self.images.names else self.kinds[1:]

    def order_by(self, record: dict[str, Any]) -> None:
        """Order each kind as an object names its parts, as `images` or `image`.

        Raises ValueError where it names some, and the sample has none.
        """
        fields = [(kind, field) for kind in self.kinds for field in (kind, f"{kind}s") if field in record]
        for kind, field in fields:
            self.of(kind, field).order_by(record[field])
        for kind, field in fields:
            if kind in self.shown_kinds:
                self.of(kind, field).check_any(record[field], field)

    def of(self, kind: str, field: str) -> PartsOfKind[DecodedImage] | PartsOfKind[MediaPart]:
        """Return those of one kind.

        Raises ValueError that names `field`, which refers to it, if the encoder takes none.
        """
        if kind == "image":
            return self.images
        if kind not in self._others:
            raise ValueError(f"{field}: a place for {kind}, but the encoder takes none. Pass {kind}=")
        return self._others[kind]

    def check_all_used(self) -> None:
        """Raise ValueError that names the first one that no field refers to."""
        for kind in self.kinds:
            self.of(kind, kind).check_all_used()


def _media_parts(sample: Sample, kind: str, text: str) -> PartsOfKind[MediaPart]:
    return PartsOfKind(sample, kind, lambda name: MediaPart(kind, name, text))


def _is_image(sample: Sample, part: str) -> bool:
    head = sample.head(part, 12)[0]
    return head.startswith(_BEGINS) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def _numbered(name: str) -> list[tuple[int, str]]:
    """A key that sorts 2.jpg before 10.jpg."""
    return [(int(digits or 0), other) for digits, other in re.findall(r"([0-9]+)|([^0-9]+)", name)]


def _from_data_url(url: str, field: str, exif: bool) -> Image.Image:
    head, comma, encoded = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("not base64")
        raw = base64.b64decode(encoded, validate=True)
        image: Image.Image = Image.open(io.BytesIO(raw), formats=_FORMATS)
        if image.mode.startswith(("I", "F")):
            raise ValueError("an image of more than 8 bits per channel. Make it one of 8 bits")
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

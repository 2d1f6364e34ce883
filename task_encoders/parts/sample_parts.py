"""Parts of a sample that an encoder reads: a `Field`, images, videos and audio.

`txt` names a part, and `json[caption]` a field of a JSON part. Text refers to images by the names of their parts, or in
order.

A JPEG of 4000 × 3000 that is needed at 500 × 375 or less is decoded at an eighth of its size, in a third of the time.
The result is a `ScaledImage`.
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
        height: Height of the full image.
        pixels: The decoded RGB image. `info["box"]` is the full image's region in it, see `Sample.image`.
    """

    width: int
    height: int
    pixels: Image.Image

    def resize(
        self, size: tuple[int, int], resample: Image.Resampling, box: tuple[float, float, float, float] | None = None
    ) -> Image.Image:
        """Resize a region of the full image, as Pillow does.

        `box` is the region. None (default): the whole image.
        """
        # the box of a mirrored photo may start within a pixel
        x0, y0, x1, y1 = whole = self.pixels.info["box"]
        if box is None:
            return self.pixels.resize(size, resample, box=whole)
        x_scale, y_scale = (x1 - x0) / self.width, (y1 - y0) / self.height
        left, top, right, bottom = box
        scaled = x0 + left * x_scale, y0 + top * y_scale, x0 + right * x_scale, y0 + bottom * y_scale
        return self.pixels.resize(size, resample, box=scaled)


def check_decode(decode: str) -> None:
    """Raise ValueError unless `decode` is "scaled" or "exact"."""
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
        """Return the value, or None if the sample does not have it.

        Raises UnicodeDecodeError or JSONDecodeError if the part cannot be decoded, and ValueError if a name of the path
        is applied to neither an object nor a list.
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

        Raises ValueError if the value is not text.
        """
        value = self.read(sample)
        if isinstance(value, str) and not self.path:
            value = self._field_of_line(sample, value)
        if value is None or isinstance(value, str):
            return value
        raise ValueError(f"{self.name}: expected text, found {type(value).__name__} {value!r:.80}")

    def _field_of_line(self, sample: Sample, text: str) -> Any:
        """Return the text of a part, unless it is the JSON of a record's field. Then return that field's value.

        A record such as {"text": ["x"]} has a part `text`, which is `["x"]`.
        """
        if "json" not in sample or self.part == "json" or text[:1] not in "[{-0123456789tf":
            return text
        try:
            value = json.loads(text)
        except ValueError:
            return text
        record = sample.json("json")
        return value if isinstance(record, dict) and record.get(self.part) == value else text


def named_part(sample: Sample, name: str | None, *kinds: str) -> str | None:
    """Return `name`, or if it is None the name of the first part of these kinds.

    The result is None if the sample has no such part. `kinds` are "image", "video" or "audio".
    """
    candidates = [name] if name else [part for kind in kinds for part in Sample.KINDS[kind]]
    return next((part for part in candidates if part in sample), None)


_IMAGE_MAGICS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"II*\0", b"MM\0*")
# formats of images in data URLs, whose decoders run no external program
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


@dataclass(frozen=True)
class MediaPart:
    """Video or audio of a sample, which is opened only when its tokens are built.

    Args:
        kind: "video" or "audio".
        name: The name of its part.
        text: The placeholder that a chat template writes for it.
    """

    kind: str
    name: str
    text: str


ShownMedia = DecodedImage | MediaPart


def media_kind(part: ShownMedia) -> str:
    """Return "image", "video" or "audio"."""
    return part.kind if isinstance(part, MediaPart) else "image"


class PartsOfKind(Generic[Opened]):
    """The images, the videos or the audio of a sample, in order.

    Images are the parts `jpg`, or `0.jpg`, `1.png`, …. The text must use each at least once, or `check_all_used`
    raises.

    Args:
        sample: The sample.
        kind: "image", "video" or "audio".
        read: Opens a part by its name.
    """

    def __init__(self, sample: Sample, kind: str, read: Callable[[str], Opened]) -> None:
        self._kind = kind
        self._read = read
        names = [name for name in sample if name.lower().rpartition(".")[2] in Sample.KINDS[kind]]
        self.names = sorted(names, key=_natural_order)
        if not self.names and kind in sample and _is_image(sample, kind):  # a table may have a column with this name
            self.names = [kind]
        self._unused = list(self.names)  # parts that the text must still use; a name listed twice must be used twice
        self._used = 0

    def next(self, field: str) -> Opened:
        """Return the first part that is not used yet.

        Raises ValueError if all parts are used. Its message names `field`, which refers to the part.
        """
        if self._unused:
            return self.named(self._unused[0], field)
        raise ValueError(
            f"{field}: a place for {self._kind} {self._used + 1}, but the sample has {self._describe()}{self._hint}"
        )

    def numbered(self, index: int, field: str) -> Opened:
        """Return the part with this index.

        Raises ValueError if there is no such part. Its message names `field`, which refers to the part.
        """
        if not 0 <= index < len(self.names):
            raise ValueError(f"{field}: {index}, but the sample has {self._describe()}{self._hint}")
        return self.named(self.names[index], field)

    def resolve(self, address: Any) -> str | None:
        """Return the name of the part, or the `data:` URL, to which a text refers.

        Returns None if there is no such part.
        """
        if isinstance(address, dict):  # a table's list of images has {"bytes": base64} or {"path": name}
            encoded = address.get("bytes")
            link = address.get("url") or address.get("path")
            address = f"data:;base64,{encoded}" if isinstance(encoded, str) else link
        if not isinstance(address, str) or address.startswith("data:"):
            return address if isinstance(address, str) and self._kind == "image" else None
        return next((name for name in self.names if name.lower() == address.lower()), None)

    def order_by(self, listed: Any) -> None:
        """Order the parts as in a list of their names.

        If a name is unknown, such as a path, the order does not change.
        """
        listed_names = [self.resolve(address) for address in (listed if isinstance(listed, list) else [listed])]
        if None not in listed_names:
            first = [name for name in listed_names if name is not None]
            self.names = [*first, *(name for name in self.names if name not in first)]
            self._unused = list(self.names)

    def check_any(self, listed: Any, field: str) -> None:
        """Raise ValueError if the `field` lists parts but the sample has none."""
        if listed and not self.names:
            raise ValueError(f"{field}: {listed!r:.80}, but the sample has {self._describe()}{self._hint}")

    def unplaced(self) -> list[Opened]:
        """Return all parts if the text has used none, else []."""
        return [] if self._used else [self.named(name, name) for name in self.names]

    def mark_used(self, name: str) -> None:
        """Count a part as used."""
        self._used += 1
        if name in self._unused:
            self._unused.remove(name)

    def named(self, name: str, field: str) -> Opened:
        """Return the part with this name, in upper or lower case.

        Errors of opening the part are raised.

        Raises ValueError if there is no such part. Its message names `field`, which refers to the part.
        """
        for part in self.names:
            if part.lower() == name.lower():
                self.mark_used(part)
                return self._read(part)
        hint = self._hint or (
            f". Nothing is downloaded: store the {self._kind} beside the text" if "://" in name else ""
        )
        raise ValueError(f"{field}: no {self._kind} {name!r:.80}, the sample has {self._describe()}{hint}")

    def check_all_used(self) -> None:
        """Raise ValueError with the name of the first part that the text has not used."""
        if self._unused:
            used = f"{len(self.names) - len(self._unused)} of {len(self.names)}"
            raise ValueError(f"{self._kind} {self._unused[0]} has no place in the text: {used} have")

    @property
    def _hint(self) -> str:
        """Return advice, for an error, if the sample has no such part: the record may name files by their paths."""
        if self.names:
            return ""
        command = f"`savable convert SRC DST --file-field {self._kind}s`"
        return f"; no file is opened that a text names: {command} stores those of a field beside the text"

    def _describe(self) -> str:
        """Return the names of the parts, for an error."""
        return ", ".join(name[:40] for name in self.names) if self.names else f"no {self._kind}"


class SampleImages(PartsOfKind[DecodedImage]):
    """Images of a sample, which may also be `data:` URLs in the text.

    `read` decodes a part. With `exif`, images of `data:` URLs are rotated by their EXIF orientation.
    """

    def __init__(self, sample: Sample, read: ReadImage = Sample.image, *, exif: bool = True) -> None:
        super().__init__(sample, "image", lambda name: read(sample, name))
        self._exif = exif

    def named(self, name: str, field: str) -> DecodedImage:
        """Return the image in this part or `data:` URL. Errors of Pillow are raised.

        Raises ValueError if there is no such image. Its message names `field`, which refers to the image.
        """
        if not name.startswith("data:"):
            return super().named(name, field)
        if name in self.names:
            self.mark_used(name)
        return _from_data_url(name, field, self._exif)


class SampleMedia:
    """Images of a sample, and its videos and audio if text can refer to them.

    Args:
        images: The images.
        sample: The sample. None (default): only images.
        takes_images: Whether the encoder takes images (default).
        texts: By kind, such as `video=`, the placeholder of a chat template.
    """

    def __init__(
        self, images: SampleImages, sample: Sample | None = None, *, takes_images: bool = True, **texts: str
    ) -> None:
        self.images = images
        self._takes_images = takes_images
        self._listed: list[str] = []  # the kinds that the record lists
        self._others = {kind: _parts_of_kind(sample, kind, text) for kind, text in texts.items() if sample is not None}

    @property
    def kinds(self) -> list[str]:
        """The kinds to which text may refer: "image", "video", "audio"."""
        return ["image", *self._others]

    @property
    def shown_kinds(self) -> list[str]:
        """The kinds that are placeholders in a text.

        They are those of `kinds` and those that the record lists, for which `of` raises an error if the encoder does
        not take them. "image" is missing if the encoder takes no images, the sample has none and its record lists none.
        `<image>` is then ordinary text, as in SVG.
        """
        shown = self.kinds if self._takes_images or self.images.names else self.kinds[1:]
        return [*shown, *(kind for kind in self._listed if kind not in shown)]

    def order_by(self, record: dict[str, Any]) -> None:
        """Order the parts of each kind as a record lists them, in `images` or `image`.

        Raises ValueError if it lists parts but the sample has none.
        """
        fields = [(kind, field) for kind in self.kinds for field in (kind, f"{kind}s") if field in record]
        for kind, field in fields:
            self.of(kind, field).order_by(record[field])
        for kind, field in fields:
            if kind in self.shown_kinds:
                self.of(kind, field).check_any(record[field], field)
        self._listed = [kind for kind in ("image", "video", "audio") if record.get(kind) or record.get(f"{kind}s")]

    def of(self, kind: str, field: str) -> PartsOfKind[DecodedImage] | PartsOfKind[MediaPart]:
        """Return the parts of one kind.

        Raises ValueError if the encoder does not take this kind. Its message names `field`, which refers to a part.
        """
        if kind == "image":
            return self.images
        if kind not in self._others:
            raise ValueError(f"{field}: a place for {kind}, but the encoder takes none. Pass {kind}=")
        return self._others[kind]

    def check_all_used(self) -> None:
        """Raise ValueError with the name of the first part that the text has not used."""
        for kind in self.kinds:
            self.of(kind, kind).check_all_used()


def _parts_of_kind(sample: Sample, kind: str, placeholder: str) -> PartsOfKind[MediaPart]:
    """Return the videos or the audio of a sample, unopened, with their placeholder."""
    return PartsOfKind(sample, kind, lambda name: MediaPart(kind, name, placeholder))


def _is_image(sample: Sample, part: str) -> bool:
    """Return whether a part starts like an image file."""
    head, _ = sample.head(part, 12)
    return head.startswith(_IMAGE_MAGICS) or (head[:4] == b"RIFF" and head[8:] == b"WEBP")


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders 2.jpg before 10.jpg."""
    return [(int(digits or 0), other) for digits, other in re.findall(r"([0-9]+)|([^0-9]+)", name)]


def _from_data_url(url: str, field: str, exif: bool) -> Image.Image:
    """Decode the image in a data URL."""
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
        # `Sample.image` does the same. Transparent pixels would otherwise show their hidden colour.
        canvas = Image.new("RGBA", image.size, "white")
        canvas.alpha_composite(image.convert("RGBA"))
        return canvas.convert("RGB")
    except (binascii.Error, ValueError, OSError) as error:
        raise ValueError(f"{field}: no image can be read from {url[:40]!r}… ({error})") from error

"""Types of parts by extension, such as image, text or JSON, and their checks.

There are also warnings of samples that dots in file names seem to have merged or split, because a key ends at the first
dot:

    img.v1.0001.jpg, img.v1.0002.jpg     →     one sample `img` of the parts v1.0001.jpg and v1.0002.jpg
"""

from __future__ import annotations

import base64
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

from savable_pipeline.core.wording import counted, listed

if TYPE_CHECKING:
    from PIL import Image


# In the order of preference for a sample's image or text. Pillow decodes all of these images.
IMAGE_PARTS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tiff", "tif", "ppm", "pgm", "pbm")
TEXT_PARTS = ("txt", "text", "caption", "md")
SUBTITLE_PARTS = ("srt", "vtt")  # strings that are not a sample's own text, because times do not belong in a caption
JSON_PARTS = ("json",)
VIDEO_PARTS = ("mp4", "webm", "mkv", "mov", "avi", "m4v", "ogv", "mpg", "mpeg", "flv", "wmv", "3gp")
# "ts" is not among them, because most such files are TypeScript instead of MPEG transport streams.
AUDIO_PARTS = ("flac", "wav", "mp3", "ogg", "opus", "m4a", "aac", "oga", "aiff", "aif", "wma", "amr", "w64", "au")
MEDIA_PARTS = frozenset((*IMAGE_PARTS, *VIDEO_PARTS, *AUDIO_PARTS))
# Formats are detected by content, but never one for which Pillow starts another program (EPS: Ghostscript).
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
DEEP_MODES = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # modes with more than 8 bits per channel
NARROWED = "narrowed"  # key of an image's `info` that says how it lost bits
# largest width × height of an image; Pillow has the same limit, which programs can disable
LARGEST_PIXELS = 178_956_970
_NEARLY_ALL = 0.9  # fraction of samples with a part, from which the others seem to lack it
_MANY_PARTS = 1000  # a sample with more parts seems merged
_RARE = 0.01  # fraction of samples, up to which a part is rare
_NUMBERED = re.compile(r"(0|[1-9][0-9]{0,2})\.")  # numbered parts such as 0.jpg, 1.jpg of an interleaved document
_DOTS = "a key ends at the first dot of a file's name: rename files, or convert them with --key-end last"
_ALIKE = {"jpeg": "jpg", "tiff": "tif"}  # extensions of the same type


def part_type(extension: str) -> str:
    """Return the last component of an extension in lower case: `png` for `seg.PNG`."""
    return extension.lower().rpartition(".")[2]


def is_part(extension: str, known: Collection[str]) -> bool:
    """Return whether one of `known` equals `extension`, ignoring case."""
    return extension in known or any(candidate.lower() == extension.lower() for candidate in known)


def find_part(extension: str, known: Iterable[str]) -> str:
    """Return the extension in `known` that equals `extension`, ignoring case.

    Raises KeyError that lists the known ones.
    """
    for candidate in known:
        if candidate.lower() == extension.lower():
            return candidate
    raise KeyError(f"no part {extension!r}; the sample has {', '.join(known)}")


def decode_error(extension: str, data: bytes, *, check_images: bool = True) -> str:
    """Return why bytes are not of the extension's type, or ""."""
    kind = part_type(extension)
    if kind in JSON_PARTS:
        return _json_error(data)
    return _image_error(data) if check_images and kind in IMAGE_PARTS else ""


def utf8_error(extension: str, data: bytes) -> str:
    """Return why bytes with a text extension are not UTF-8, or ""."""
    if part_type(extension) not in (*TEXT_PARTS, *SUBTITLE_PARTS):
        return ""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return f"malformed text: {error}"
    return ""


def _json_error(data: bytes) -> str:
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"malformed JSON: {error}"
    return ""


def open_image(data: bytes | BinaryIO, extension: str = "") -> Image.Image:
    """Open an image, without decoding it.

    Only the header is read. Raises `PIL.UnidentifiedImageError` for another format, and
    `PIL.Image.DecompressionBombError` for more than `LARGEST_PIXELS`.
    """
    from PIL import Image, UnidentifiedImageError  # imported here, because the import takes time and memory

    formats: tuple[str, ...] = IMAGE_FORMATS
    if extension and part_type(extension) not in IMAGE_PARTS:
        named = Image.registered_extensions().get(f".{part_type(extension)}", "EPS")
        formats = (*IMAGE_FORMATS, named) if named != "EPS" else formats
    try:
        image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=formats)
    except UnidentifiedImageError:
        size = f"{len(data)} bytes" if isinstance(data, bytes) else "the bytes of a file"
        raise UnidentifiedImageError(f"{size}: not an image of {', '.join(formats)}") from None
    if image.mode not in DEEP_MODES and (how := _how_narrowed(image)):
        image.info[NARROWED] = how
    if image.width * image.height > LARGEST_PIXELS:
        raise Image.DecompressionBombError(
            f"image of {image.width:,} × {image.height:,} pixels, over {LARGEST_PIXELS:,}. Decode its bytes yourself"
        )
    return image


def _how_narrowed(image: Image.Image) -> str:
    """Return how Pillow narrows an image's 16-bit colors to 8 bits per channel, or "" if it has none.

    Pillow narrows them because none of its modes holds 16-bit colors.
    """
    arguments = [tile.args for tile in getattr(image, "tile", ())]
    if any(";16" in str(each) for each in arguments):
        return "v >> 8"
    # the last argument of a PPM's decoder is the largest value of a color
    is_deep_ppm = image.format == "PPM" and any(isinstance(each, tuple) and each[-1] > 0xFF for each in arguments)
    return "v / 257" if is_deep_ppm else ""


def is_deep(image: Image.Image) -> bool:
    """Return whether channels of an image of `open_image` have more than 8 bits."""
    return image.mode in DEEP_MODES or NARROWED in image.info


def eight_bits(image: Image.Image, bits: int | None) -> Image.Image:
    """Return an image with 8 bits per channel.

    Raises ValueError if bits would be lost without the user's consent, and for floats.
    """
    if not is_deep(image):
        return image
    narrowed = image.info.get(NARROWED, "v >> 8")
    if image.mode == "F" or narrowed != "v >> 8":
        kind = "floats" if image.mode == "F" else "colours of 16 bits in PPM"
        raise ValueError(f"an image of {kind}, which 8 bits cannot hold. Decode and scale the bytes yourself")
    import numpy as np
    from PIL.Image import fromarray  # imported here, because the import takes time and memory

    values = np.asarray(image)
    if image.mode in DEEP_MODES and (values.min(initial=0) < 0 or values.max(initial=0) > 0xFFFF):
        raise ValueError("an image of 32 bits per channel. Use sample.image() without mode=, and scale it")
    if bits is None:
        raise ValueError(
            "an image of 16 bits per channel. Pass bits=8 for v >> 8, or use sample.image() without mode= if gray"
        )
    return image if NARROWED in image.info else fromarray((values >> 8).astype(np.uint8))


def _image_error(data: bytes) -> str:
    from PIL import UnidentifiedImageError  # imported here, because the import takes time and memory

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about odd metadata and large images, which still load
            with open_image(data) as image:
                # for JPEG, all codes are read, but only an eighth of the pixels are computed
                image.draft(image.mode, (1, 1))
                image.load()
    except UnidentifiedImageError:
        return "unreadable image: not JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise errors of any type for damaged data
        return f"unreadable image: {str(error) or type(error).__name__}"
    return ""


def as_part(value: Any) -> bytes | None:
    """Return a value as the bytes of a part.

    A string becomes UTF-8, any other value JSON. Bytes and None are returned unchanged.

    >>> from savable_pipeline.data.shards.part_types import as_part
    >>> [as_part(value) for value in ("text", b"\xff", 1.5, [1, None])]
    [b'text', b'\xff', b'1.5', b'[1, null]']
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if type(value) is int:  # the most frequent type, which this makes four times as fast
        return b"%d" % value
    return json.dumps(value, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: bytes to base64, times to ISO 8601, durations to seconds, decimals to text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value.total_seconds() if hasattr(value, "total_seconds") else str(value)


def are_merged(parts: Collection[str], counts: Mapping[str, int]) -> bool:
    """Return whether dots in names seem to have merged these parts into one sample.

    This is so if each part has a dot and most are in no other sample. So `seg.png` next to `jpg` is not merged.
    `counts` has the number of samples with each part.
    """
    return all("." in part for part in parts) and 2 * sum(counts[part] == 1 for part in parts) > len(parts)


def lacking_parts(samples: int, counts: Mapping[str, int]) -> list[str]:
    """Return warnings of samples that lack a part, one per line.

    There are `samples` samples, and `counts` has the number of those with each part. `JPG`, `jpeg` and `jpg` are one
    part.
    """
    samples_with = Counter[str]()  # by part, alike extensions counted as one
    for part, count in counts.items():
        name, dot, kind = part.lower().rpartition(".")
        samples_with[f"{name}{dot}{_ALIKE.get(kind, kind)}"] += count
    return [
        f"{samples - count} of {samples} samples have no part {part}, which the others have"
        for part, count in sorted(samples_with.items())
        if _NEARLY_ALL * samples <= count < samples
    ]


def dotted_parts(
    samples: int, counts: Mapping[str, int], most_parts: int = 0, part_sets: Iterable[Collection[str]] = ()
) -> list[str]:
    """Return warnings of dots in names, one per line.

    `samples` and `counts` are as for `lacking_parts`. `most_parts` is the largest number of parts in a sample.
    `part_sets` has the parts of samples in which every part has a dot.
    """
    found = []
    rare = [
        part
        for part, count in counts.items()
        if "." in part and not _NUMBERED.match(part) and count <= max(1, _RARE * samples) < samples
    ]
    merged = [sorted(parts) for parts in part_sets if are_merged(parts, counts)]
    if merged:
        found.append(
            f"{counted(len(merged), 'sample has', 'samples have')} only parts with a dot, most of them in no other "
            f"sample, such as {merged[0][0]}; {_DOTS}"
        )
    elif sum(counts[part] for part in rare) >= (1 - _NEARLY_ALL) * samples and rare:
        found.append(f"{len(rare)} parts are in hardly any sample: {listed(rare)}; {_DOTS}")
    if most_parts > _MANY_PARTS:
        found.append(f"one sample has {most_parts} parts; {_DOTS}")
    return found

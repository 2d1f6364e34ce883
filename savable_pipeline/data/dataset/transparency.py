"""Images with alpha: laid over a background, since dropping alpha shows the colours that lie under what is clear."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from PIL import Image

Colour: TypeAlias = str | tuple[int, int, int]
"""A name or `#rrggbb`, as Pillow knows them, or red, green and blue of 0 to 255."""


def has_alpha(image: Image.Image) -> bool:
    """Whether pixels of an image may be clear: by an alpha channel, a clear colour, or a palette with either."""
    palette = image.palette
    return (
        image.mode.endswith(("A", "a"))
        or "transparency" in image.info
        or (image.mode == "P" and palette is not None and palette.mode.endswith("A"))
    )


def converted(image: Image.Image, mode: str, background: Colour) -> Image.Image:
    """The image in this mode, decoded; one with alpha is laid over the background, unless the mode has alpha itself."""
    if mode.endswith(("A", "a")) or not has_alpha(image):
        if image.mode != mode:
            return image.convert(mode)
        image.load()  # `convert` would copy it: a tenth of a JPEG's time, at 12 megapixels a third
        return image
    from PIL import Image  # imported here: it takes time and memory

    canvas = Image.new("RGBA", image.size, background)
    canvas.alpha_composite(image.convert("RGBA"))
    return canvas.convert(mode)

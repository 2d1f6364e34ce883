"""Documents of texts and images in the formats of OBELICS and MMC4, as one list.

    {"texts": ["A cat:", null, "asleep."], "images": [null, "0.jpg", null]}

    {"text_list": ["A cat.", "A dog."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}

OBELICS (Laurençon et al., 2023) has two lists, one with null where the other has something. In MMC4 (Zhu et al., 2023)
an image comes before the text it is matched with. Images are known by the names of their parts, or, where one of the
document's is none, such as a URL, taken in order.
"""

from __future__ import annotations

from typing import Any

from PIL import Image

from task_encoders.parts.sample_images import SampleImages

Part = str | Image.Image


def parse_document(record: Any, images: SampleImages) -> list[Part]:
    """Texts, none of them empty, and images of a sample's JSON. Raises ValueError that names the field at fault."""
    if isinstance(record, dict) and "texts" in record:
        parts = _obelics(_list(record, "texts"), _list(record, "images"), images)
    elif isinstance(record, dict) and "text_list" in record:
        parts = _mmc4(_list(record, "text_list"), _list(record, "image_info"), images)
    else:
        found = f"the fields {', '.join(record)}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"expected an object with texts and images, or text_list and image_info, found {found}")
    images.check_all_used()
    return [part for part in parts if part != ""]


def _obelics(texts: list[Any], places: list[Any], images: SampleImages) -> list[Part]:
    if len(texts) != len(places):
        raise ValueError(f"texts and images: expected lists of one length, found {len(texts)} and {len(places)}")
    named = all(place is None or place in images.names for place in places)
    parts: list[Part] = []
    for number, (text, place) in enumerate(zip(texts, places, strict=True)):
        if (text is None) == (place is None):
            raise ValueError(f"texts[{number}] and images[{number}]: expected null in one of them, and not in both")
        if text is not None:
            parts.append(_text(text, f"texts[{number}]"))
        else:
            parts.append(_image(place if named else None, f"images[{number}]", images))
    return parts


def _mmc4(texts: list[Any], places: list[Any], images: SampleImages) -> list[Part]:
    names = [place.get("image_name") if isinstance(place, dict) else None for place in places]
    named = all(name in images.names for name in names)
    before: dict[int, list[Image.Image]] = {}
    for number, (place, name) in enumerate(zip(places, names, strict=True)):
        at = f"image_info[{number}]"
        index = place.get("matched_text_index") if isinstance(place, dict) else None
        if type(index) is not int or not 0 <= index < len(texts):
            raise ValueError(f"{at}.matched_text_index: expected 0 to {len(texts) - 1}, found {index!r:.80}")
        before.setdefault(index, []).append(_image(name if named else None, at, images))
    parts: list[Part] = []
    for number, text in enumerate(texts):
        parts += [*before.get(number, ()), _text(text, f"text_list[{number}]")]
    return parts


def _image(name: str | None, at: str, images: SampleImages) -> Image.Image:
    return images.next(at) if name is None else images.named(name, at)


def _text(text: Any, at: str) -> str:
    if isinstance(text, str):
        return text
    raise ValueError(f"{at}: expected text, found {text!r:.80}")


def _list(record: dict[str, Any], name: str) -> list[Any]:
    value = record.get(name)
    if isinstance(value, list):
        return value
    raise ValueError(f"{name}: expected a list, found {value!r:.80}")

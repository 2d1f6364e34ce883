"""`tiles_of_processor`: tiles and texts of a processor of `transformers`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from task_encoders.parts.image_tiles import BICUBIC, LANCZOS, Buckets, ImageTiles, NativeSize, SplitTiles, Tiles

TilesAndTexts = tuple[ImageTiles, str, str]  # tiles, and the texts before and after an image


def tiles_of_processor(processor: Any, patch: int | None = None) -> TilesAndTexts:
    """Read the tiles of a processor's images, and the texts before and after an image.

    Args:
        processor: A processor of `transformers` with an `image_processor`.
        patch: The side of a patch. None (default): that of the processor.

    Raises:
        ValueError: The processor, or one of its settings, is not supported.
    """
    image_processor = processor.image_processor
    names = [cls.__name__.removesuffix("Fast").removesuffix("Pil") for cls in type(image_processor).__mro__]
    known_name = next((name for name in names if name in _TILE_READERS), None)
    if known_name is None:
        raise ValueError(
            f"Vision.from_processor does not know {names[0]}, only {', '.join(sorted(_TILE_READERS))}. Write "
            "Vision(tiles, token, mean=…, std=…)"
        )
    patch = patch or getattr(image_processor, "patch_size", None) or getattr(processor, "patch_size", None)
    if patch is None:
        raise ValueError(f"{type(processor).__name__} has no patch_size. Pass patch=config.vision_config.patch_size")
    read_tiles, resample = _TILE_READERS[known_name]
    _check_attributes(
        image_processor, do_resize=True, do_rescale=True, rescale_factor=1 / 255, do_normalize=True, resample=resample
    )
    return read_tiles(processor, image_processor, patch)


def _check_attributes(owner: Any, **needed: Any) -> None:
    """Raise ValueError if an attribute has another value than the one needed. A missing attribute is fine."""
    for name, value in needed.items():
        found = getattr(owner, name, value)
        if (found or None) != (value or None):  # processors often have None for False
            raise ValueError(
                f"{type(owner).__name__} has {name}={found!r}, but Vision.from_processor needs {value!r}. Write "
                "Vision(tiles, token, mean=…, std=…)"
            )


def _qwen_tiles(processor: Any, image_processor: Any, patch: int) -> TilesAndTexts:
    """Read a processor of Qwen-VL. A processor of Omni has its texts as attributes."""
    before = getattr(processor, "vision_bos_token", "<|vision_start|>")
    after = getattr(processor, "vision_eos_token", "<|vision_end|>")
    min_pixels, max_pixels = image_processor.size["shortest_edge"], image_processor.size["longest_edge"]
    return NativeSize(patch, image_processor.merge_size, min_pixels, max_pixels), before, after


def _llava_tiles(processor: Any, image_processor: Any, patch: int) -> TilesAndTexts:
    """Read a processor of LLaVA, which crops the central square or squeezes the whole image."""
    drops_first_token = processor.vision_feature_select_strategy == "default"
    _check_attributes(processor, num_additional_image_tokens=int(drops_first_token))
    side = image_processor.size.get("shortest_edge")
    if side is not None:
        _check_attributes(image_processor, do_center_crop=True, crop_size={"height": side, "width": side})
        return Buckets(patch, 1, side * side, side, side), "", ""
    side = image_processor.size["height"]
    _check_attributes(image_processor, do_center_crop=False, size={"height": side, "width": side})
    return Tiles(patch, 1, side, max_tiles=1), "", ""


def _internvl_tiles(processor: Any, image_processor: Any, patch: int) -> TilesAndTexts:
    """Read a processor of InternVL."""
    side = image_processor.size["height"]
    merge = side // patch // math.isqrt(processor.image_seq_length)
    tiles = Tiles(patch, merge, side, image_processor.min_patches, image_processor.max_patches)
    return tiles, processor.start_image_token, processor.end_image_token


def _smolvlm_tiles(processor: Any, image_processor: Any, patch: int) -> TilesAndTexts:
    """Read a processor of SmolVLM or Idefics3."""
    _check_attributes(image_processor, do_image_splitting=True)
    side = image_processor.max_image_size["longest_edge"]
    merge = side // patch // math.isqrt(processor.image_seq_len)
    return SplitTiles(patch, merge, side, image_processor.size["longest_edge"]), "", "<fake_token_around_image>"


# for each class of image processors, the function that reads its tiles, and the resampling that it must have
_TILE_READERS: dict[str, tuple[Callable[[Any, Any, int], TilesAndTexts], int]] = {
    "CLIPImageProcessor": (_llava_tiles, BICUBIC),
    "GotOcr2ImageProcessor": (_internvl_tiles, BICUBIC),
    "Idefics3ImageProcessor": (_smolvlm_tiles, LANCZOS),
    "Qwen2VLImageProcessor": (_qwen_tiles, BICUBIC),
    "SiglipImageProcessor": (_llava_tiles, BICUBIC),
    "SmolVLMImageProcessor": (_smolvlm_tiles, LANCZOS),
}

"""Images in text are those of the processors of `transformers`: `Vision.from_processor` against each, made of the
numbers in its published preprocessor_config.json.

Pixels equal those of the processor's Pillow version. Its version of torchvision has other kernels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from savable_pipeline.core.rng import Rng
from task_encoders.chat import ChatEncoder
from task_encoders.parts.image_tiles import Buckets, NativeSize, SplitTiles, Tiles
from task_encoders.parts.medium import MediumTokens
from task_encoders.parts.vision import Vision
from tests.support.toy_samples import item, png, sample, trained_tokenizer

pytestmark = pytest.mark.landing  # the processors of transformers take eight seconds to import

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
NET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SIZES = [(640, 427), (427, 640), (90, 51), (336, 336), (1001, 333), (37, 1200), (1500, 1499)]
SPLIT = {"do_image_splitting": True, "resample": 1, **HALF}


class Model(NamedTuple):
    """The image processor of a model, its other settings, and the equivalent tiles."""

    images: str
    numbers: dict[str, Any]
    more: dict[str, Any]
    patch: int | None
    tiles: Any


SQUARE_336 = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, "do_center_crop": True}
LLAVA = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
BARE = {"patch_size": 14, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
INTERN = {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "min_patches": 1, "max_patches": 12, **NET}
MODELS = {
    "Qwen2-VL": Model(
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "patch_size": 14, "merge_size": 2, **CLIP},
        {},
        None,
        NativeSize(14, 2, 3136, 12845056),
    ),
    "LLaVA 1.5": Model("CLIPImageProcessor", {**SQUARE_336, **CLIP}, LLAVA, None, Buckets(14, 1, 336 * 336, 336, 336)),
    "LLaVA on SigLIP": Model(
        "SiglipImageProcessor",
        {"size": {"height": 384, "width": 384}, "resample": 3, **HALF},
        BARE,
        None,
        Tiles(14, 1, 384, max_tiles=1),
    ),
    "InternVL3": Model("GotOcr2ImageProcessor", INTERN, {"image_seq_length": 256}, 14, Tiles(14, 2, 448, 1, 12)),
    "SmolVLM2 500M": Model(
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, **SPLIT},
        {"image_seq_len": 64},
        16,
        SplitTiles(16, 4, 512, 2048),
    ),
    "SmolVLM2 2.2B": Model(
        "SmolVLMImageProcessor",
        {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}, **SPLIT},
        {"image_seq_len": 81},
        14,
        SplitTiles(14, 3, 384, 1536),
    ),
}


def processor(name: str, *, pillow: bool = True, **changed: Any) -> Any:
    """Return the attributes of a model's processor that `Vision.from_processor` reads."""
    import transformers

    model = MODELS[name]
    images = getattr(transformers, model.images + "Pil" * pillow)(**{**model.numbers, **changed})
    words = SimpleNamespace(convert_tokens_to_ids={"<image>": 300}.__getitem__)
    more = {"start_image_token": "<img>", "end_image_token": "</img>", **model.more}
    return SimpleNamespace(image_processor=images, tokenizer=words, image_token="<image>", **more)


def vision(name: str) -> Vision:
    """Return the vision setting read from the processor of this model."""
    return Vision.from_processor(processor(name), patch=MODELS[name].patch)


def photo(width: int, height: int) -> Image.Image:
    """Return noise, some of it coarse."""
    draw = np.random.default_rng(width)
    coarse = Image.fromarray(draw.integers(0, 256, (7, 9, 3), np.uint8)).resize((width, height))
    fine = draw.integers(-40, 41, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(coarse) + fine, 0, 255).astype(np.uint8))


def our_tiles(shown: Vision, image: Image.Image) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the tiles that a model gets, float32 (tiles, 3, height, width), and their grids."""
    fields = shown.tokenize(image).fields
    batch = shown.batch(fields, torch.tensor([1]))
    rows, columns = fields["grids"][0].tolist()
    tiles = batch["patches"].unflatten(0, (-1, rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return tiles.flatten(4).flatten(2, 3), fields["grids"].tolist()


def processor_tiles(made: Any, image: Image.Image, like: torch.Tensor) -> torch.Tensor:
    """Return the tiles and grids of a processor. Qwen's patches are in blocks of 2 × 2 and duplicated in time."""
    with_pixels = made.image_processor(images=[image], return_tensors="pt")
    pixels = with_pixels["pixel_values"]
    if "image_grid_thw" in with_pixels:
        _, rows, columns = with_pixels["image_grid_thw"][0].tolist()
        blocks = pixels.view(rows // 2, columns // 2, 2, 2, 3, 2, 14, 14)[:, :, :, :, :, 0]
        return blocks.permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * 14, columns * 14)
    pixels = pixels.flatten(0, -4)
    return pixels[..., : like.shape[2], : like.shape[3]]  # what is left of a side fills no patch


@pytest.mark.parametrize("name", MODELS)
def test_tiles_and_grids_equal_the_processors(name: str) -> None:
    shown = vision(name)
    numbers = MODELS[name].numbers
    assert shown.tiles == MODELS[name].tiles
    assert [list(shown.mean), list(shown.std)] == [numbers["image_mean"], numbers["image_std"]]
    assert (shown.token, shown.text) == (300, "<image>")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_equal_the_processors(name: str, size: tuple[int, int]) -> None:
    image = photo(*size)
    tiles, grids = our_tiles(vision(name), image)
    expected = processor_tiles(processor(name), image, tiles)
    assert tiles.shape == expected.shape
    assert len(grids) == len(tiles)
    assert (tiles - expected).abs().max() < 1e-5  # rounding of float32; a grey level is 0.014 or more


@pytest.mark.parametrize("name", MODELS)
def test_pixels_differ_from_torchvisions_by_half_a_level(name: str) -> None:
    image = photo(640, 427)
    tiles, _ = our_tiles(vision(name), image)
    expected = processor_tiles(processor(name, pillow=False), image, tiles)
    assert tiles.shape == expected.shape
    off = (tiles - expected).abs() * 255 * max(vision(name).std)
    assert off.max() < 9 and off.mean() < 0.5  # rows or columns are resized first, and rounded in between


@pytest.mark.parametrize("name", ["SmolVLM2 500M", "SmolVLM2 2.2B"])
@pytest.mark.parametrize("size", [(640, 427), (300, 900), (500, 500)])
def test_texts_and_tokens_of_a_split_image_equal_smolvlms(name: str, size: tuple[int, int]) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    shown, made = vision(name), processor(name)
    found = made.image_processor(images=[photo(*size)], return_row_col_info=True)
    wanted = get_image_prompt_string(
        found["rows"][0][0],
        found["cols"][0][0],
        made.image_seq_len,
        image_token="<image>",
        fake_token_around_image="<fake_token_around_image>",
        global_image_token="<global-img>",
    )
    for one in (shown.tokenize(photo(*size)), shown.measure(SimpleNamespace(width=size[0], height=size[1]))):
        pieces = [piece if isinstance(piece, str) else "<image>" * piece.tokens for piece in shown.pieces(one)]
        assert "".join(pieces) == wanted


def test_an_image_that_fills_one_tile_is_not_split() -> None:
    tiles = SplitTiles(16, 4, 512, 512)
    assert tiles.texts(640, 427) == ("<fake_token_around_image><global-img>",)
    assert len(tiles.cut(photo(640, 427))[1]) == 1


def encoded_chat(shown: Vision) -> Any:
    """Return a chat with two images, as an item, and its encoder."""
    encoder = ChatEncoder(trained_tokenizer(), vision=shown)
    images = {"0.png": png(np.asarray(photo(64, 40))), "1.png": png(np.asarray(photo(30, 60)))}
    turns = [{"from": "human", "value": "<image> or <image>?"}, {"from": "gpt", "value": "the first"}]
    return encoder, item(encoder, sample({"json": {"conversations": turns}, **images}))


def test_tiles_are_enclosed_by_texts_and_cut_and_counted_as_one_image() -> None:
    shown = Vision(SplitTiles(2, 2, 8, 32), 300)
    encoder, made = encoded_chat(shown)
    runs = [len(run) for run in "".join("#" if token == 300 else " " for token in made["tokens"]).split()]
    assert made["tile_counts"].tolist() == [13, 9] and runs == [4] * 22
    assert shown.token_counts(made) == [52, 36]
    second = [number for number, token in enumerate(made["tokens"].tolist()) if token == 300][52:]
    part = encoder.cut(made, second[0], second[-1] + 1)
    assert part["tile_counts"].tolist() == [9] and len(part["patches"]) == 9 * 16
    with pytest.raises(ValueError, match="cut through the image"):
        encoder.cut(made, second[0], second[-1])
    assert len(encoder.batch([encoder.pack([made, part], Rng(7))], Rng(7))["grids"]) == 31


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("LLaVA 1.5", {"do_center_crop": False}, "do_center_crop=False"),
        ("LLaVA 1.5", {"crop_size": {"height": 224, "width": 224}}, "crop_size="),
        ("LLaVA 1.5", {"do_normalize": False}, "do_normalize=False"),
        ("LLaVA on SigLIP", {"resample": 2}, "resample=2, but .* needs .*BICUBIC"),
        ("SmolVLM2 500M", {"do_image_splitting": False}, "do_image_splitting=False"),
    ],
)
def test_processor_settings_without_an_equivalent_are_rejected(
    name: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Vision.from_processor(processor(name, **changed), patch=14)


def test_unknown_processor_or_one_without_patch_size_is_rejected() -> None:
    from transformers import ViTImageProcessorPil

    with pytest.raises(ValueError, match=r"does not know ViTImageProcessor, only CLIPImageProcessor"):
        Vision.from_processor(SimpleNamespace(image_processor=ViTImageProcessorPil()))
    with pytest.raises(ValueError, match=r"no patch_size. Pass patch=config.vision_config.patch_size"):
        Vision.from_processor(processor("InternVL3"))
    other = processor("LLaVA 1.5")
    other.num_additional_image_tokens = 0
    with pytest.raises(ValueError, match=r"num_additional_image_tokens=0, but .* needs 1"):
        Vision.from_processor(other)


def test_image_of_one_tile_has_no_texts() -> None:
    only = vision("LLaVA 1.5").tokenize(photo(64, 40))
    assert isinstance(only, MediumTokens) and only.texts == () and only.tokens == 576

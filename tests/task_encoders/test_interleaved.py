"""`InterleavedEncoder`: texts and images in turns, cut where a document is long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from savable_pipeline.core.rng import Rng
from savable_pipeline.stages.task_encoder import Skip
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.parts.image_tiles import NativeSize, Tiles
from task_encoders.parts.token_packing import IGNORED
from task_encoders.parts.tokenizer import Tokenizer
from task_encoders.parts.vision import Vision
from tests.support.toy_samples import item, plain_png, sample, without_pixels, word_lengths
from tests.support.toy_transformer import assert_packs_equal_documents

RNG = Rng(7)
IMAGE = 259
VISION = Vision(NativeSize(patch=2, merge=2, min_pixels=16, max_pixels=256), IMAGE)


def obelics(*parts: Any, **images: bytes) -> Any:
    """Return a sample of texts (str) and names of images (bytes) in OBELICS' format."""
    texts = [part if isinstance(part, str) else None for part in parts]
    places = [None if isinstance(part, str) else part.decode() for part in parts]
    return sample({"json": {"texts": texts, "images": places}, **{f"{n}.png": image for n, image in images.items()}})


def encoder(**settings: Any) -> InterleavedEncoder:
    """Return an encoder of words, with BOS (8) and EOS (9)."""
    return InterleavedEncoder(Tokenizer(word_lengths, bos=8, eos=9), vision=VISION, **settings)


def as_list(made: Any) -> list[dict[str, Any]]:
    """Return the results of `encode` as a list."""
    return [made] if isinstance(made, dict) else list(made)


def test_text_contributes_to_the_loss_and_images_do_not() -> None:
    made = item(encoder(), obelics("a bb", b"1.png", "ccc", b"0.png", **{"0": plain_png(4, 4), "1": plain_png(8, 4)}))
    assert without_pixels(made) == {
        "tokens": [8, 1, 2, IMAGE, IMAGE, 3, IMAGE, 9],
        "labels": [1, 2, IGNORED, IGNORED, 3, IGNORED, 9, IGNORED],
        "grids": [[2, 4], [2, 2]],
        "tile_counts": [1, 1],
    }


def test_mmc4s_images_come_before_the_text_they_belong_to() -> None:
    places = [{"image_name": "b.png", "matched_text_index": 1}, {"image_name": "a.png", "matched_text_index": 0}]
    record = {"text_list": ["a", "bb"], "image_info": places}
    images = {"a.png": plain_png(4, 4), "b.png": plain_png(8, 4)}
    assert item(encoder(), sample({"json": record, **images}))["tokens"].tolist() == [8, IMAGE, 1, IMAGE, IMAGE, 2, 9]
    for place in places:
        place["image_name"] = "https://somewhere/x.jpg"  # then in order: a.png is the first
    assert item(encoder(), sample({"json": record, **images}))["tokens"].tolist() == [8, IMAGE, IMAGE, 1, IMAGE, 2, 9]


parts = st.lists(
    st.one_of(st.text("ab ", min_size=1, max_size=20), st.sampled_from([(4, 4), (8, 8), (16, 4)])), max_size=6
)


@settings(deadline=None)
@given(parts=parts, max_length=st.integers(4, 12))
def test_long_document_is_cut_outside_images_without_losing_targets(parts: Any, max_length: int) -> None:
    images = [part for part in parts if not isinstance(part, str)]
    named = iter(range(len(images)))
    listed = [part if isinstance(part, str) else f"{next(named)}.png".encode() for part in parts]
    given_one = obelics(*listed, **{str(i): plain_png(*size, i) for i, size in enumerate(images)})
    whole, cut = encoder().encode(given_one, RNG), encoder(max_length=max_length).encode(given_one, RNG)
    if isinstance(whole, Skip):
        assert isinstance(cut, Skip)
        return
    made = [cut] if isinstance(cut, dict) else list(cut)  # type: ignore[arg-type]
    pieces = [piece for piece in made if not isinstance(piece, Skip)]
    assert all(1 <= len(piece["tokens"]) <= max_length for piece in pieces)
    assert all((piece["labels"] >= 0).any() for piece in pieces)
    labels, joint = torch.cat([piece["labels"] for piece in pieces]), as_list(whole)[0]
    assert torch.equal(labels[labels >= 0], joint["labels"][joint["labels"] >= 0])
    if len(pieces) == len(made):
        for name, expected in joint.items():
            assert torch.equal(torch.cat([piece[name] for piece in pieces]), expected)
    for piece in pieces:
        assert VISION.tiles.tokens(piece["grids"]) == int((piece["tokens"] == IMAGE).sum())
        assert len(piece["patches"]) == int(piece["grids"].prod(1).sum())


@pytest.mark.parametrize(
    ("given_one", "reason"),
    [
        (sample(txt="a"), "no json"),
        (obelics(), "empty"),
        (obelics("", ""), "empty"),
        (obelics("a", b"0.png", **{"0": plain_png(16, 16)}), "image longer than max_length"),
    ],
)
def test_document_without_an_item_is_skipped_by_reason(given_one: Any, reason: str) -> None:
    made = encoder(max_length=15).encode(given_one, RNG)
    assert isinstance(made, Skip)
    assert made.reason == reason


def record(texts: Any, images: Any) -> dict[str, Any]:
    return {"texts": texts, "images": images}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "expected an object with texts and images, or text_list and image_info, found list"),
        ({"text": "a"}, "found the fields text"),
        (record("a", ["0.png"]), "texts: expected a list, found 'a'"),
        (record([None], None), "images: expected a list, found nothing"),
        (record(["a"], [None, "0.png"]), "expected lists of one length, found 1 and 2"),
        (record(["a"], ["0.png"]), r"texts\[0\] and images\[0\]: expected null in all but one of them"),
        (record([None], [None]), r"texts\[0\] and images\[0\]: expected null in all but one"),
        (record([7, None], [None, "0.png"]), r"texts\[0\]: expected text, found 7"),
        (record([None, None], ["0.png", "1.png"]), r"images\[1\]: a place for image 2, but the sample has 0.png"),
        (record(["a"], [None]), "image 0.png has no place in the text"),
        ({"text_list": ["a"], "image_info": [{}]}, r"image_info\[0\].matched_text_index: expected 0 to 0, found None"),
        ({"text_list": ["a"], "image_info": [{"matched_text_index": 1}]}, "expected 0 to 0, found 1"),
        ({"text_list": [1], "image_info": [{"matched_text_index": 0}]}, r"text_list\[0\]: expected text, found 1"),
    ],
)
def test_error_names_the_wrong_field(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder().encode(sample({"json": wrong, "0.png": plain_png(4, 4)}), RNG)


def test_cut_through_an_image_is_an_error_but_not_next_to_it() -> None:
    made = item(encoder(), obelics("a", b"0.png", "bb", b"1.png", **{"0": plain_png(8, 4, 1), "1": plain_png(4, 4, 2)}))
    assert made["tokens"].tolist() == [8, 1, IMAGE, IMAGE, 2, IMAGE, 9]
    rest = encoder().cut(made, 4, 7)
    assert without_pixels(rest) == {
        "tokens": [2, IMAGE, 9],
        "labels": [-100, 9, -100],
        "grids": [[2, 2]],
        "tile_counts": [1],
    }
    assert rest["patches"].unique().tolist() == [2]
    assert [encoder().images(each) for each in (made, rest, encoder().cut(made, 0, 2))] == [2, 1, 0]
    with pytest.raises(ValueError, match="tokens 0 to 3 cut through the image at 2 to 4"):
        encoder().cut(made, 0, 3)


def test_text_with_the_image_token_is_an_error() -> None:
    clash = InterleavedEncoder(word_lengths, vision=Vision(VISION.tiles, 3))
    with pytest.raises(ValueError, match="the text itself has the image token 3"):
        clash.encode(obelics("a ccc"), RNG)


def test_model_computes_the_same_on_packs_as_on_single_documents() -> None:
    vision = Vision(Tiles(patch=2, merge=2, side=4, max_tiles=3), IMAGE, before="(", after=")")
    made = InterleavedEncoder(vision=vision)
    documents = [
        obelics("a cat", b"0.png", "and a dog", b"1.png", **{"0": plain_png(4, 4, 9), "1": plain_png(12, 4, 80)}),
        obelics("no image at all"),
        obelics(b"0.png", "first the image", **{"0": plain_png(4, 8, 200)}),
    ]
    a, b, c = (item(made, document) for document in documents)
    assert_packs_equal_documents(made, [[a, b], [c]], patch=2, merge=4, image_token=IMAGE)


def test_the_image_token_is_an_id() -> None:
    with pytest.raises(ValueError, match=r"expected an id, such as tokenizer\.token_to_id\('<image>'\)"):
        Vision(VISION.tiles, token="<image>")  # type: ignore[arg-type]

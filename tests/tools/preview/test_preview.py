"""`savable preview`: what its pages hold; that nothing of the data runs, passes through, or is read without bound."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import sys
import tarfile
import tracemalloc
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.named_object import names_object
from savable_pipeline.stages.pipeline import named_pipeline
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.preview import preview_dataset, preview_pipeline
from savable_pipeline.tools.preview.image_entries import array_entry, as_array
from savable_pipeline.tools.preview.token_entries import Decoder, tokens_entry
from task_encoders.captioning import CaptioningEncoder
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.language_modeling import LanguageModelingEncoder
from task_encoders.parts.image_tiles import NativeSize
from task_encoders.parts.vision import Vision
from tests.conftest import MakeShards, write_tar
from tests.support.toy_files import jpeg

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><b style=x>"
ALLOWED = (
    "html head meta title style body header main p h1 h2 h3 small bdi dl div dt dd table thead tbody tr th td span i "
    "section article pre img ul li ol details summary wbr code figure figcaption nav a audio video svg path footer "
    "label input b"
)


class Page(HTMLParser):
    """Parsed page: its elements with their attributes, its text, and the text of each `h2`."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.titles: list[str] = []
        self._spans: list[tuple[list[str], str]] = []
        self.feed(page.decode())
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in ("meta", "img", "wbr", "input"):
            self.open.append(tag)
        if tag == "span":
            self._spans.append(((dict(attributes).get("class") or "").split(), ""))
        if tag == "h2":
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("dt", "td", "th"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self.open and self.open[-1] == "span":
            self._spans[-1] = (self._spans[-1][0], self._spans[-1][1] + data)
        if "h2" in self.open:
            self.titles[-1] += data

    @property
    def images(self) -> list[Image.Image]:
        sources = [attributes["src"] or "" for tag, attributes in self.elements if tag == "img"]
        assert all(re.match(r"data:image/(png|jpeg);base64,", source) for source in sources)
        return [Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) for source in sources]

    @property
    def links(self) -> list[str]:
        """Return the links within the page."""
        found = [attributes["href"] or "" for tag, attributes in self.elements if tag == "a"]
        assert found.pop().startswith("https://"), "the documentation, at the end of the page"
        return [link for link in found if re.fullmatch(r"(preview(-\d+)?\.html)", link) is None]

    def spans(self, kind: str) -> list[str]:
        """Return the texts of the spans of this class."""
        return [text for kinds, text in self._spans if kind in kinds]

    def check_harmless(self) -> None:
        assert {tag for tag, _ in self.elements} <= set(ALLOWED.split())
        names = {name for _, attributes in self.elements for name in attributes}
        assert not [name for name in names if name.startswith("on") or name in ("srcset", "action", "autoplay")]
        ids = [attributes["id"] for _, attributes in self.elements if "id" in attributes]
        assert len(ids) == len(set(ids)) and set(self.links) <= {f"#{each}" for each in ids}, "links lead somewhere"
        sources = [attributes["src"] or "" for tag, attributes in self.elements if tag in ("audio", "video")]
        assert all(re.fullmatch(r"data:(audio|video)/[a-z0-9]+;base64,[A-Za-z0-9+/]+=*", source) for source in sources)
        assert len(self.images) == sum(tag == "img" for tag, _ in self.elements)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def png(pixels: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", **options)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def search_path() -> Iterator[None]:
    """Restore the module path, to which a target adds its folder, for processes that tests start later."""
    before = [*sys.path]
    yield
    sys.path[:] = before


@pytest.fixture
def captioned(tmp_path: Path) -> Path:
    """Write three shards of ten captioned images."""
    root = tmp_path / "captioned"
    for shard in range(3):
        numbers = range(10 * shard, 10 * shard + 10)
        members = [
            m for i in numbers for m in ((f"k{i:02d}.jpg", jpeg(i, 32)), (f"k{i:02d}.txt", f"text {i}".encode()))
        ]
        write_tar(root / f"{shard}.tar", members)
    return root


def test_the_page_of_a_dataset_counts_it_and_shows_samples_of_all_its_shards(captioned: Path) -> None:
    (captioned / ".nv-meta").mkdir()
    (captioned / ".nv-meta/split.yaml").write_text(json.dumps({"split_parts": {"train": ["0.tar"], "val": ["1.tar"]}}))
    (captioned / ".nv-meta/.info.json").write_text(json.dumps({"shard_counts": {f"{i}.tar": 10 for i in range(3)}}))
    page = Page(preview_dataset(captioned, samples=12))
    page.check_harmless()
    drawn = [title for title in page.titles if title.startswith("k")]
    assert len(drawn) == 12 == len(page.images) and drawn == sorted(drawn)
    assert {int(title[1:]) // 10 for title in drawn} == {0, 1, 2}, "not the first ones only"
    assert all(f"text {int(title[1:])}" in page.text for title in drawn)
    words = " ".join(page.text.split())
    assert "samples 30 shards 3" in words and "split train 10 samples" in words and "jpg 30 100 " in words
    again, others = (Page(preview_dataset(captioned, samples=12, seed=seed)) for seed in (0, 1))
    assert again.titles == page.titles != others.titles


def test_contents_of_a_dataset_never_become_markup(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (100, 80)).save(buffer, "JPEG", comment=EVIL.encode(), icc_profile=EVIL.encode())
    svg = f"<svg onload='alert(3)'>{EVIL}</svg>".encode()
    parts = {"jpg": buffer.getvalue(), "txt": EVIL.encode(), "json": json.dumps({EVIL: f"</pre>{EVIL}\ud800"}).encode()}
    parts |= {"svg": svg, "png": svg, "<i onclick=x>": b"\x80", "caption": "\u202eevil\0".encode(), "pkl": b"cos\nx"}
    name = EVIL.replace(".", "")
    with tarfile.open(tmp_path / f"{EVIL.replace('/', '')}.tar", "w") as tar:
        for extension, data in parts.items():
            info = tarfile.TarInfo(f"{name}.{extension}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    raw = preview_dataset(tmp_path)
    page = Page(raw)
    page.check_harmless()
    assert name in page.titles and EVIL in page.text and svg.decode() in page.text, "shown as text"
    assert "\\u202eevil\\u0000" in page.text and "beginning with 80" in page.text
    assert len(page.images) == 1 and "unreadable image: not JPEG, PNG" in page.text
    assert page.images[0].size == (100, 80) and not page.images[0].info.keys() & {"comment", "icc_profile", "exif"}

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(tmp_path, lane), LanguageModelingEncoder()), size=1)

    page = Page(preview_pipeline(pipeline, EVIL, batches=1).html)
    page.check_harmless()
    assert name in page.text, "in the list of the batch's samples"
    assert "<" in [*page.spans("loss")], "the caption, token by token"


def test_damage_is_shown_with_its_reason_among_other_samples(captioned: Path) -> None:
    bad = [("b0.jpg", jpeg(1, 64)[:700]), ("b0.json", b"{'a'"), ("b0.txt", b"\xff\xfe"), ("b0.bin", b"\x01\x02")]
    write_tar(captioned / "3.tar", [*bad, ("b1.jpg", bytes(100)), ("b1.txt", b"fine")])
    preview_dataset(captioned)  # which indexes it
    (captioned / "0.tar").unlink()
    os.truncate(captioned / "1.tar", 4000)
    page = Page(preview_dataset(captioned, samples=32))
    page.check_harmless()
    for reason in (
        "unreadable image: image file is truncated",
        "malformed JSON: Expecting property name",
        "malformed text: 'utf-8' codec",
        "zero-filled: the first 100 bytes",
        "0.tar: No such file or directory",
        "1.tar: 4000 bytes, but",
    ):
        assert reason in page.text, reason
    assert page.titles.count("unreadable sample") == 20
    assert "fine" in page.text and len(page.images) == 10


def test_a_shard_damaged_before_it_was_indexed_is_listed(captioned: Path) -> None:
    os.truncate(captioned / "1.tar", 4000)
    page = Page(preview_dataset(captioned))
    assert "Damaged shards" in page.titles and "1.tar" in page.text


def test_neither_images_nor_texts_of_any_size_take_much_memory(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(bomb, "PNG")
    write_tar(tmp_path / "0.tar", [("a.png", bomb.getvalue()), ("b.json", b"[" * 100_000)])
    with (tmp_path / "1.tar").open("wb") as file:
        info = tarfile.TarInfo("c.txt")
        info.size = 1 << 30
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + "é".encode() * 100_000)
        file.truncate(512 + info.size + 1024)  # a hole
    preview_dataset(tmp_path)
    tracemalloc.start()
    page = Page(preview_dataset(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20
    assert "not decoded: 10,000 × 10,000 PNG 1, more than 50,000,000 pixels" in page.text
    assert "é" * 1500 + " …" in page.text and "é" * 1501 not in page.text
    assert "malformed JSON" in page.text and not page.images


@pytest.mark.parametrize(
    "borders",
    [
        {"cu_seqlens": torch.tensor([0, 3, 5, 6])},
        {"document_ids": torch.tensor([[4, 4, 4], [7, 7, 0]])},
        {"position_ids": torch.tensor([[0, 1, 2], [0, 1, 0]])},
        {"cu_seqlens": torch.tensor([[0, 3], [0, 2]])},
    ],
)
def test_targets_and_borders_of_documents_are_found(borders: dict[str, torch.Tensor]) -> None:
    fields = {"tokens": torch.tensor([[1, 2, 3], [4, 5, 0]]), "labels": torch.tensor([[2, -100, 9], [5, -100, -100]])}
    rows = tokens_entry("tokens", "tokens", {**fields, **borders}, Decoder(None)).rows
    found = [[(span.text, span.kind, span.begins, span.next) for span in row.spans] for row in rows]
    assert found == [
        [("‹1›", "ignored", True, ""), ("‹2›", "loss", False, ""), ("‹3›", "ignored", False, "‹9›")],
        [("‹4›", "ignored", True, ""), ("‹5›", "loss", False, ""), ("‹0›", "ignored", True, "")],
    ]
    assert [row.note for row in rows] == [
        "row 0: 3 tokens, 2 with loss (67%)",
        "row 1: 3 tokens, 2 segments, 1 with loss (33%)",
    ]


def test_aligned_labels_loss_masks_and_missing_labels_are_distinguished() -> None:
    tokens = np.array([[7, 8, 9]])

    def kinds(**fields: np.ndarray) -> list[str]:
        (row,) = tokens_entry("tokens", "tokens", {"tokens": tokens, **fields}, Decoder(None)).rows
        return [span.kind for span in row.spans]

    assert kinds(labels=np.array([[-100, 8, 9]])) == ["ignored", "loss", "loss"]
    assert kinds(loss_mask=np.array([[1.0, 0.0, 0.5]])) == ["loss", "ignored", "loss"]
    assert kinds(labels=np.array([1])) == kinds() == ["unknown"] * 3


def test_characters_of_several_tokens_are_one_span_and_padding_is_shown_once() -> None:
    encoder = LanguageModelingEncoder(max_length=20)
    text = torch.tensor([257, *"é🦊a".encode(), 258])
    batch = encoder.batch([{"tokens": text, "labels": torch.full_like(text, -100)}], sp.Rng(0))
    (row,) = tokens_entry("tokens", "tokens", batch, Decoder(encoder)).rows
    assert [(span.text, span.repeat, span.begins) for span in row.spans] == [
        ("‹bos›", 1, True),
        ("é", 1, False),
        ("🦊", 1, False),
        ("a", 1, False),
        ("‹eos›", 1, False),
        ("‹pad›", 11, True),
    ]


@pytest.mark.parametrize(
    ("name", "image", "colour"),
    [
        ("image", torch.full((2, 3, 16, 20), 200, dtype=torch.uint8), 200),
        ("x", torch.full((2, 16, 20, 3), 200, dtype=torch.uint8), 200),
        ("pixel_values", torch.full((1, 2, 1, 16, 20), 0.5, dtype=torch.bfloat16), 127),
        ("image", torch.full((2, 16, 20), -0.5), 63),
        ("x", np.stack([np.tile([np.nan, -7.0, 3.0, 3.0, 3.0], (3, 16, 4)), np.full((3, 16, 20), np.nan)]), 255),
    ],
)
def test_images_of_every_layout_and_scale_become_thumbnails(name: str, image: torch.Tensor, colour: int) -> None:
    array = as_array(image)
    assert array is not None
    entry = array_entry(name, image, array, None)
    (first, _) = entry.thumbnails
    decoded = Image.open(io.BytesIO(base64.b64decode(first.uri.partition(",")[2])))
    assert decoded.size == (20, 16) and decoded.getpixel((3, 3)) == (colour,) * 3


def test_other_arrays_are_shown_as_numbers() -> None:
    told = {
        "int64 (3,), 1 to 4: 1 4 2": torch.tensor([1, 4, 2]),
        "float16 (2, 2), 0.5 to 2": torch.tensor([[0.5, 1], [2, 1]], dtype=torch.float16),
        "float32 (2,), nan to nan, 1 not finite: 1 nan": torch.tensor([1, torch.nan]),
        "bool (2,), 1 true: 1 0": np.array([True, False]),
        "int32 (0,), empty": np.zeros(0, dtype=np.int32),
    }
    for note, value in told.items():
        array = as_array(value)
        assert array is not None and array_entry("x", value, array, None).note == note


def test_the_page_of_a_packed_pipeline_shows_its_path_its_packs_and_its_samples(captioned: Path) -> None:
    encoder = CaptioningEncoder(image_size=16, augment=False)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(captioned, lane, shuffle=False, epochs=1), encoder)
        return sp.Batcher(sp.OnlinePacker(items, max_length=20, policy="sequential"), size=1)

    page = Page(preview_pipeline(pipeline, "train:pipeline", batches=2).html)
    page.check_harmless()
    assert "OnlinePacker max_length=20" in page.text and "batch 1" in page.titles and "0.tar · k00" in page.text
    assert len(page.spans("begins")) == 1 + 3 + 3, "one of the legend, three of each pack"
    assert page.images[0].size == (16, 16)
    assert page.links == [f"#t{batch}-0-{document}" for batch in (0, 1) for document in (0, 1, 2)]
    red, _, blue = page.images[0].getpixel((8, 8))  # type: ignore[misc]
    assert abs(blue - 0) < 12 and abs(red - 128) < 24, "normalized and back"


def test_patches_are_reassembled_to_their_image(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
    document = {"texts": ["a", None], "images": [None, "0.png"]}
    write_tar(tmp_path / "0.tar", [("d.0.png", png(pixels)), ("d.json", json.dumps(document).encode())])
    tiles = NativeSize(patch=4, merge=1, min_pixels=16, max_pixels=4096)
    encoder = InterleavedEncoder(vision=Vision(tiles, 300))

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(tmp_path, lane), encoder), size=1)

    page = Page(preview_pipeline(pipeline, "p", batches=1).html)
    (image,) = page.images
    assert page.links == ["#t0-0-0"]
    assert np.abs(np.asarray(image).astype(int) - pixels).max() <= 1


def test_batches_without_an_encoder_and_of_any_type_are_shown(make_shards: MakeShards) -> None:
    root = make_shards([4])
    page = Page(preview_pipeline(lambda lane: sp.Batcher(sp.TarShardReader(root, lane), size=2), "p", batches=1).html)
    assert '"id": ' in page.text

    class Odd(sp.TaskEncoder):
        def encode(self, sample: sp.Sample, rng: sp.Rng) -> object:
            return {"nested": {"list": ["a<b", (1, 2)], 3: object}, "raw": b"\0\1", "self": Unprintable()}

        def batch(self, items: list[object], rng: sp.Rng) -> object:
            return items

    page = Page(
        preview_pipeline(lambda lane: sp.Batcher(sp.Encode(sp.TarShardReader(root, lane), Odd()), size=1), "p").html
    )
    page.check_harmless()
    for shown in ("[0].nested.list[0]", "a<b", "tuple: (1, 2)", "2 bytes, beginning with 00 01", "cannot be printed"):
        assert shown in page.text


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("cannot be printed")


def test_pipeline_error_is_shown_in_place_of_its_batch(make_shards: MakeShards) -> None:
    root = make_shards([4])

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(sp.TarShardReader(root, lane), LanguageModelingEncoder(part="json[id]")), size=2)

    page = Page(preview_pipeline(pipeline, "p").html)
    assert "could not be built" in page.text and "LanguageModelingEncoder.encode failed" in page.text
    short = Page(preview_pipeline(lambda lane: sp.Batcher(sp.TarShardReader(root, lane, epochs=1), size=3), "p").html)
    assert "the lane has 2 batches" in short.text


def test_the_command_writes_one_page_of_a_dataset_or_of_a_pipeline(captioned: Path, tmp_path: Path) -> None:
    result = run("preview", captioned, "-o", tmp_path / "d.html", "--samples", "3")
    size = (tmp_path / "d.html").stat().st_size
    assert result.exit_code == 0 and result.stdout == f"{tmp_path / 'd.html'}: {size / 1000:.1f} kB\n"
    script = tmp_path / "toy_train_of_preview.py"
    script.write_text(
        "import savable_pipeline as sp\n"
        f"def pipeline(lane):\n    return sp.Batcher(sp.TarShardReader({str(captioned)!r}, lane), size=2)\n"
    )
    assert run("preview", f"{script}:pipeline", "-o", tmp_path / "p.html", "--lanes", "4", "--lane", "3").exit_code == 0
    assert "3 of 4" in Page((tmp_path / "p.html").read_bytes()).text
    with script.open("a") as file:
        file.write("class Broken(sp.TaskEncoder):\n    def encode(self, sample, rng):\n        raise KeyError('eye')\n")
        file.write(f"def broken(lane):\n    samples = sp.TarShardReader({str(captioned)!r}, lane)\n")
        file.write("    return sp.Batcher(sp.Encode(samples, Broken()), size=2)\n")
    sys.modules.pop(script.stem)
    failed = run("preview", f"{script}:broken", "-o", tmp_path / "f.html")
    assert failed.exit_code == 1 and "a batch could not be built: Broken.encode failed" in failed.stderr
    assert "could not be built" in Page((tmp_path / "f.html").read_bytes()).text
    for wrong in (f"{script}:nothing", "no_such_module_of_preview:pipeline", tmp_path / "nothing"):
        assert run("preview", wrong, "-o", tmp_path / "x.html").exit_code == 2
    assert run("preview", captioned, "-o", tmp_path / "x.html", "--samples", "0").exit_code == 2
    assert run("preview", captioned, "-o", tmp_path / "no/x.html").exit_code == 2
    assert not (tmp_path / "x.html").exists()


def test_pipeline_names_and_shard_paths_are_distinguished(tmp_path: Path) -> None:
    assert all(names_object(name) for name in ("train:pipeline", "a.b_c:make", "train.py:p", "/x y/train.py:p"))
    others = ("shards/", "shards/{0..3}.tar", "s3://bucket/x", "C:\\x", "a-b:c", "train.py", ":p", "a:")
    assert not any(names_object(name) for name in others)
    assert named_pipeline("tests.tools.preview.test_preview:toy_pipeline") is toy_pipeline
    with pytest.raises(ValueError, match="pipeline must be"):
        named_pipeline("tests.tools.preview.test_preview:ALLOWED")


def toy_pipeline(lane: sp.Lane) -> custom.Stage:
    raise NotImplementedError


def test_unreadable_samples_are_red_and_first(captioned: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    for number in range(30):
        (folder / f"{number:02d}.txt").write_text("fine")
    (folder / "17.json").write_text("{")
    for seed in range(3):
        page = preview_dataset(folder, samples=2, seed=seed).decode()
        articles = re.findall(r"<article( class=\"faulty\")?>\s*<h2><bdi>(\d+)", page)
        assert articles[0] == (' class="faulty"', "17") and not any(red for red, _ in articles[1:])
        assert "1 of 30 samples that were read have an error" in page
    assert "have an error" not in preview_dataset(captioned, samples=2).decode()


def test_the_data_path_is_in_the_order_of_the_code_with_long_settings_folded(captioned: Path) -> None:
    def pipeline(lane: sp.Lane) -> Any:
        return sp.Batcher(sp.Encode(sp.TarShardReader(str(captioned), lane), LanguageModelingEncoder()), size=2)

    page = preview_pipeline(pipeline, "p", batches=1).html.decode()
    names = re.findall(r"<li><b>(\w+)</b>", page)
    assert names == ["TarShardReader", "Encode", "Batcher"]
    assert re.search(r"Encode</b><details><summary>\d+ settings</summary>.*max_length=", page)
    assert "<b>Batcher</b> size=2" in page

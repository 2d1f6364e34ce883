"""Pictures of a pack are linked to the document that they are in, and to no other."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.tools.preview import preview_pipeline
from savable_pipeline.tools.preview.image_entries import array_entry
from savable_pipeline.tools.preview.token_entries import documents_of, with_documents
from task_encoders.interleaved import InterleavedEncoder
from task_encoders.parts.image_tiles import NativeSize
from task_encoders.parts.vision import Vision
from tests.conftest import write_tar
from tests.support.toy_files import jpeg
from tests.tools.preview.test_preview import Page


def test_images_are_linked_to_their_documents(tmp_path: Path) -> None:
    members = []
    for key, images in (("a", 2), ("b", 0), ("c", 1)):
        names = [f"{number}.jpg" for number in range(images)]
        document = {"texts": [key, *(None for _ in names)], "images": [None, *names]}
        members += [(f"{key}.{name}", jpeg(1, 32)) for name in names]
        members.append((f"{key}.json", json.dumps(document).encode()))
    write_tar(tmp_path / "0.tar", members)
    encoder = InterleavedEncoder(vision=Vision(NativeSize(patch=4, merge=2, min_pixels=64, max_pixels=4096), 300))

    def links(max_length: int) -> list[str]:
        def pipeline(lane: sp.Lane) -> custom.Stage:
            items = sp.Encode(sp.TarShardReader(tmp_path, lane, shuffle=False, epochs=1), encoder)
            packs = sp.OnlinePacker(items, max_length=max_length)
            return sp.Batcher(packs, size=2, drop_last=False)

        page = Page(preview_pipeline(pipeline, "p", batches=1).html)
        page.check_harmless()
        return page.links

    assert links(max_length=100) == ["#t0-0-0", "#t0-0-0", "#t0-0-2"]
    assert links(max_length=45) == ["#t0-0-0", "#t0-0-0", "#t0-1-0"], "the third document is a row of its own"


def test_images_have_no_guessed_or_dangling_links() -> None:
    fields = {"tokens": torch.arange(2400)[None], "cu_seqlens": torch.tensor([0, 1200, 2400])}
    image = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    entry = array_entry("image", image, image.numpy(), None)
    documents = documents_of("tokens", fields, "t0")
    assert with_documents(entry, image, documents, fields, None) == entry, "two pictures of a row: whose are they?"
    index = torch.arange(2).repeat_interleave(1200)[None]
    linked = with_documents(entry, image, documents, {**fields, "image_index": index}, None).thumbnails
    assert [(each.caption, each.link) for each in linked] == [("document 0", "t0-0-0"), ("document 1", "")]

"""What `energon prepare-media` has written is passed over: our own table has the values of the headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.media.extractor import MediaFilterConfig

import savable_pipeline as sp
from savable_pipeline.data.dataset.media_indexing import index_media
from savable_pipeline.data.media import media_table
from savable_pipeline.data.media.media_info import MediaInfo
from tests.support.media_files import audio_bytes, video_bytes
from tests.support.shards import write_tar
from tests.support.toy_samples import plain_png

TURNED = 1  # the sample whose video is


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards, whose media Energon has looked at."""
    root = tmp_path_factory.mktemp("energon")
    for shard in range(2):
        members = []
        for number in (2 * shard, 2 * shard + 1):
            turned = 90 if number == TURNED else 0
            video, sound = video_bytes(6 + number, audio="aac", rotation=turned), audio_bytes(0.5, channels=2)
            members += [(f"d/s{number}.json", b"{}"), (f"d/s{number}.mp4", video), (f"d/s{number}.flac", sound)]
            members += [(f"d/s{number}.seg.png", plain_png(8 + number, 9)), (f"d/s{number}.opus", b"no sound")]
        write_tar(root / f"{shard}.tar", members)
    WebdatasetPreparator.prepare_dataset(EPath(root), ["0.tar", "1.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
    by_extension = MediaFilterConfig.parse(None, False, True)
    WebdatasetPreparator.add_media_metadata(EPath(root), media_filter=by_extension, workers=1)
    return root


@pytest.fixture
def dataset(prepared: Path, tmp_path: Path) -> Path:
    """A copy."""
    for path in prepared.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(prepared)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path


def said(root: Path) -> list[list[MediaInfo]]:
    return [[sample.media(part) for part in ("mp4", "flac", "seg.png")] for sample in sp.open_dataset(root)]


def test_our_media_table_replaces_energons_database(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = said(dataset)
    assert headers[TURNED][0].width == 48  # Energon's are not turned
    (dataset / ".nv-meta/index.sqlite").write_bytes(b"no database")
    assert said(dataset) == headers
    index_media(dataset)
    with monkeypatch.context() as patched:
        patched.setattr(media_table, "media_info", no_header)
        assert said(dataset) == headers


def no_header(*_: Any) -> MediaInfo:
    raise AssertionError("a header was read")

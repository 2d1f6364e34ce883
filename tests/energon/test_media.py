"""What `energon prepare-media` has written is read as data, of the tars that it was made of."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.prepare import WebdatasetPreparator
from megatron.energon.media.extractor import MediaFilterConfig

import savable_pipeline as sp
from savable_pipeline.data.dataset.media_indexing import index_media
from savable_pipeline.data.media import known_media
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


def no_header(*_: Any) -> MediaInfo:
    raise AssertionError("a header was read")


def test_energons_values_are_given_without_a_header(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(known_media, "media_info", no_header)
        found = said(dataset)
    (dataset / ".nv-meta/index.sqlite").unlink()
    headers = said(dataset)
    assert headers[TURNED][0].width == 48 and found[TURNED][0].width == 64  # Energon's are not turned
    found[TURNED][0] = headers[TURNED][0]
    assert found == headers


def test_what_energon_has_not_is_read_from_the_headers(dataset: Path) -> None:
    with pytest.raises(ValueError, match=r"part 'opus' of sample 'd/s0' of 0.tar: cannot be opened"):
        next(iter(sp.open_dataset(dataset))).media("opus")


def test_our_own_table_goes_first(dataset: Path) -> None:
    assert sp.open_dataset(dataset)[TURNED].media("mp4").width == 64
    index_media(dataset)
    assert sp.open_dataset(dataset)[TURNED].media("mp4").width == 48


def test_a_part_that_lies_elsewhere_now_is_refused(dataset: Path) -> None:
    write_tar(dataset / "1.tar", [("d/s2.flac", b""), ("d/s2.mp4", video_bytes(3))])
    with pytest.raises(sp.ShardError, match=r"d/s2.mp4 is not where it was .* `savable index --media`"):
        sp.open_dataset(dataset)[2].media("mp4")


@pytest.mark.parametrize(
    "value", ["{", '{"video_fps": "x"}', b"\xff", '{"video_duration": -5.0}', '{"audio_channels": -1}']
)
def test_values_that_are_none_are_refused(dataset: Path, value: Any) -> None:
    with sqlite3.connect(dataset / ".nv-meta/index.sqlite") as database:
        database.execute("UPDATE media_metadata SET metadata_json = ?", (value,))
    with pytest.raises(
        sp.ShardError, match=r"index.sqlite: Energon's metadata of media do not fit the shards: d/s0.mp4"
    ):
        said(dataset)


def test_a_database_that_is_none_or_has_no_media_is_passed_over(dataset: Path) -> None:
    path = dataset / ".nv-meta/index.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("ALTER TABLE media_metadata RENAME TO others")
        database.execute("CREATE VIEW media_metadata AS SELECT * FROM others")  # one could be made to run for ever
    assert sp.open_dataset(dataset)[TURNED].media("mp4").width == 48
    path.write_bytes(b"no database")
    assert sp.open_dataset(dataset)[TURNED].media("mp4").width == 48

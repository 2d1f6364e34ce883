"""The node's cache writes to its user's own files alone: through no link, into no pipe, into no other user's folder.

A file that lies there whole is of the version that its pin names, or it is none.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.core.files import replace_file
from savable_pipeline.data.remote import cache_files
from savable_pipeline.data.remote.cache_files import drop_whole, pin_whole, pinned_version, whole_version
from savable_pipeline.data.remote.cache_space import CacheSpace, cache_folder
from savable_pipeline.errors import RemoteError
from tests.conftest import write_numbered_shards
from tests.support.toy_server import ToyServer, serving

BEFORE = b"not of the cache"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_RETRY_S", "20")  # a busy machine is no fault
    (tmp_path / "shards").mkdir()
    write_numbered_shards(tmp_path / "shards", [6, 9])
    sp.open_dataset(tmp_path / "shards")  # makes the index
    with serving(tmp_path) as server:
        yield server


def all_of(url: str) -> list[bytes]:
    return [sample["json"] for sample in sp.open_dataset(url)]


def linked(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def piped(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def linked_pipe(path: Path, victim: Path) -> None:
    os.mkfifo(victim.with_name("pipe"))
    path.symlink_to(victim.with_name("pipe"))


@pytest.mark.parametrize(
    ("name", "put"), [("room", linked), ("flags", linked_pipe), ("0.tar", linked), ("0.tar", piped), ("lock", piped)]
)
def test_replaced_cache_file_is_rejected_and_not_written_through(
    server: ToyServer, tmp_path: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    url = f"{server.url}/shards/"
    expected = all_of(url)
    (own,) = (tmp_path / "cache").iterdir()
    for path in own.rglob("*.tar"):
        path.unlink()  # which are downloaded again
    paths = list(own.rglob(name)) if name != "0.tar" else [next(own.rglob("flags")).with_name(name)]
    victim = tmp_path / "victim"
    victim.write_bytes(BEFORE)
    for path in paths:
        path.unlink(missing_ok=True)
        put(path, victim)
    with pytest.raises(RemoteError) as caught:
        all_of(url)
    assert name in str(caught.value) and victim.read_bytes() == BEFORE
    for path in paths:
        path.unlink()
    assert all_of(url) == expected


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_of_the_cache_that_is_a_link_is_rejected(server: ToyServer, tmp_path: Path, depth: int) -> None:
    url = f"{server.url}/shards/"
    all_of(url)
    (folder,) = (tmp_path / "cache").iterdir()
    for _ in range(depth):
        (folder,) = (path for path in folder.iterdir() if path.is_dir() and path.name not in ("listings", "metadata"))
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RemoteError, match=f"{folder}: a link of the user .*, but the cache may only have"):
        all_of(url)


def test_configured_cache_may_be_a_link_and_open_to_all(
    server: ToyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "link"))
    assert len(all_of(f"{server.url}/shards/")) == 15
    (own,) = (tmp_path / "disk").iterdir()
    assert own.name == str(os.geteuid()) and stat.S_IMODE(own.stat().st_mode) == 0o700


def test_cache_folder_open_to_other_users_is_made_private(tmp_path: Path) -> None:
    own = tmp_path / str(os.geteuid())
    own.mkdir(mode=0o755)
    own.chmod(0o777)
    assert cache_folder(tmp_path) == own and stat.S_IMODE(own.stat().st_mode) == 0o700


def test_another_users_folder_and_file_are_rejected_by_the_owners_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pwd

    owner, other = pwd.getpwuid(os.geteuid()).pw_name, 2**31 - 7
    (tmp_path / "file").write_bytes(BEFORE)
    (tmp_path / str(other)).mkdir()
    monkeypatch.setattr(cache_files.os, "geteuid", lambda: other)
    told = f"of the user {owner}, but the cache .* of the user number {other}"
    with pytest.raises(RemoteError, match=f"{tmp_path}/{other}: a folder {told}"):
        cache_folder(tmp_path)
    with pytest.raises(RemoteError, match=f"{tmp_path}/file: a file {told}"):
        cache_files.open_private(tmp_path / "file", "w")
    assert (tmp_path / "file").read_bytes() == BEFORE


def test_temporary_file_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(BEFORE)
    (tmp_path / "file.tmp").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        replace_file(tmp_path / "file", [b"new"], sync=True)
    assert victim.read_bytes() == BEFORE
    replace_file(tmp_path / "file", [b"new"], sync=True)  # the link was removed as any rest of a crash
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("spoil", ["nothing", "a byte", "the end", "the file", "the pin", "the pin's end"])
def test_a_file_is_whole_only_with_all_its_bytes_and_its_pin(tmp_path: Path, spoil: str) -> None:
    path, pin = tmp_path / "film.idx", tmp_path / "film.idx.pin"
    path.write_bytes(b"0123456789")
    pin_whole(path, '"v1" or so')
    if spoil == "a byte":
        path.write_bytes(b"012345678X")
    elif spoil == "the end":
        path.write_bytes(b"012345678")
    elif spoil == "the file":
        path.unlink()
    elif spoil == "the pin":
        pin.write_bytes(bytes(pin.stat().st_size))
    elif spoil == "the pin's end":
        pin.write_bytes(pin.read_bytes()[:-1])
    assert whole_version(path) == ('"v1" or so' if spoil == "nothing" else None)
    assert pinned_version(path) == ("" if "pin" in spoil else '"v1" or so')
    drop_whole(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("raw", [b"", bytes(16), b"1234567", b"\xff" * 16])
def test_bytes_in_use_whose_count_is_damaged_are_measured_again(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "0.tar").write_bytes(bytes(9000))
    (tmp_path / "room").write_bytes(raw)
    space = CacheSpace(tmp_path, 30_000)
    assert not space.try_reserve(20_000)
    assert space.try_reserve(5000)

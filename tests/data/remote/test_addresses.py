"""Addresses are asked for as they are written; credentials of AWS's profiles are read, and refreshed."""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

import pytest

import savable_pipeline as sp
from savable_pipeline.data.remote import object_store
from savable_pipeline.data.remote.object_store import ObjectStore
from savable_pipeline.errors import RemoteError
from tests.support.shards import write_numbered_shards
from tests.support.toy_server import ToyServer, serving, serving_a_machine

NAMES = ["a%20b.tar", "a+b.tar", "a%2Bb.tar", "%C3%A4.tar", "100%25.tar", "a%23b.tar", "a,b.tar", "a(1).tar", "ä b.tar"]
KEYS = """
import json, time
print(json.dumps({"Version": 1, "AccessKeyId": f"KEY{time.time_ns()}", "SecretAccessKey": "secret",
                  "SessionToken": "token", "Expiration": "EXPIRES"}))
"""


@pytest.mark.parametrize("folder", ["plain", "with%20blank"])
@pytest.mark.parametrize("name", NAMES)
def test_url_is_requested_as_written(tmp_path: Path, name: str, folder: str) -> None:
    (tmp_path / unquote(folder)).mkdir()
    (tmp_path / unquote(folder) / unquote(name)).write_bytes(b"0123456789")
    with serving(tmp_path) as server:
        store, root, found = ObjectStore(2.0), f"{server.url}/{folder}", bytearray()
        stat = store.stat(root, name)
        assert stat is not None and stat[0] == 10
        store.copy(root, name, 2, 7, 10, lambda chunk, offset: found.extend(chunk))
        assert found == b"23456"


def test_shards_at_escaped_urls_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_a_machine(tmp_path, monkeypatch) as server:
        write_numbered_shards(tmp_path / "www", [3])
        (shard,) = (tmp_path / "www").glob("*.tar")
        shard.rename(shard.with_name("my data.tar"))
        assert len(sp.open_dataset(f"{server.url}/my%20data.tar")) == 3


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile whose credentials come from a program, new ones each time, and expire in five minutes."""
    pytest.importorskip("boto3")
    soon = datetime.now(UTC) + timedelta(minutes=5)
    (tmp_path / "keys.py").write_text(KEYS.replace("EXPIRES", soon.isoformat()))
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = eu-west-1\ncredential_process = {sys.executable} {tmp_path / 'keys.py'}\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    return config


def keys_sent(server: ToyServer) -> list[str]:
    """The keys by which the requests were signed, and the region."""
    signed = [{name.lower(): value for name, value in headers.items()} for headers in server.headers]
    return [each["authorization"].partition("Credential=")[2] for each in signed if "authorization" in each]


def test_credentials_of_a_profile_are_read_and_refreshed_before_they_expire(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.tar").write_bytes(b"0123456789")
    with serving(tmp_path) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        store = ObjectStore(2.0)
        for _ in range(2):
            assert (store.stat("s3://b", "a.tar") or [0])[0] == 10
        keys = keys_sent(server)
    assert len(keys) >= 2 and all(key.startswith("KEY") and "/eu-west-1/s3/" in key for key in keys)
    provider = object_store._credentials()["credential_provider"]
    first, second = provider(), provider()
    assert first["access_key_id"] != second["access_key_id"] and first["token"] == "token"
    assert first["expires_at"] - datetime.now(UTC) <= timedelta(minutes=10)


def test_environment_keys_win_and_a_missing_profile_is_an_error(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(RemoteError, match=r"no credentials for AWS_PROFILE='gone': .*gone"):
        ObjectStore(1.0).stat("s3://b", "a.tar")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert object_store._credentials() == {}

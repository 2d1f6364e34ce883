"""No password, token or signature of an address is told, kept or sent to another host."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core.wording import clean_address
from savable_pipeline.data.remote.object_store import ObjectStore
from savable_pipeline.errors import RemoteError
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert.target import target_at
from tests.conftest import MakeShards
from tests.support.toy_server import serving, use_as_s3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://me:hidden@h/a b", "http://h/a b"),
        ("https://hidden@h:8/a@b.tar", "https://h:8/a@b.tar"),
        ("s3://key:hid/den@b", "s3://key:hid/den@b"),  # a slash ends the host
        ("https://h/a.tar?hidden", "https://h/a.tar?…"),
        ("az://c/a.tar?sv=1&sig=hidden, and more", "az://c/a.tar?… and more"),
        ("s3://b/shard-?.tar", "s3://b/shard-?.tar"),
        ("pipe:curl 'https://u:hidden@h/x?token=hidden' | cat", "pipe:curl 'https://h/x?…' | cat"),
        ("/data/a@b?c=d", "/data/a@b?c=d"),
    ],
)
def test_url_is_shown_without_secrets(text: str, told: str) -> None:
    assert clean_address(text) == told


@pytest.mark.parametrize(
    "url",
    [
        "http://me:hidden@127.0.0.1:1/shards/a.tar",
        "https://hidden@127.0.0.1:1/a.tar",
        "http://127.0.0.1:1/a.tar?token=hidden",
        "https://127.0.0.1:1/a.tar?hidden",
        "s3://key:hidden@bucket/shards/",
        "ftp://me:hidden@h/a.tar",
        "pipe:curl http://me:hidden@h/a.tar",
    ],
)
def test_a_url_with_a_secret_is_rejected_and_the_secret_not_repeated(
    url: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(sp.ShardError) as caught:
        sp.TarShardReader(url, sp.Lane())
    with pytest.raises(SystemExit):
        app(["info", url])
    written = capsys.readouterr()
    for told in (str(caught.value), caplog.text, written.out, written.err):
        assert "hidden" not in told


@pytest.mark.parametrize("target", ["s3://key:hidden@bucket/there", "ftp://me:hidden@h/there"])
def test_a_target_with_a_secret_is_rejected_and_the_secret_not_repeated(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(SystemExit) as ended:
        app(["convert", str(tmp_path / "a.jsonl"), target])
    written = capsys.readouterr()
    assert ended.value.code and written.err
    assert "hidden" not in written.out + written.err
    with pytest.raises(ValueError, match=r"bucket|folder|password") as caught, target_at(target):
        pass
    assert "hidden" not in str(caught.value)


def test_address_of_a_users_store_is_saved_without_secrets(tmp_path: Path) -> None:
    class Numbers(custom.RecordStore):
        address = "db://me:hidden@host/table?password=hidden"
        entries = (custom.ShardEntry("all", size=0, samples=40, digest=1),)

        def key(self, shard: int, row: int) -> str:
            return str(row)

        def extensions(self, shard: int, row: int) -> list[str]:
            return ["json"]

        def read(self, shard: int, row: int, extension: str) -> bytes:
            return str(row).encode()

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(custom.RecordReader(lane.shared("numbers", Numbers), lane), size=2)

    with sp.SavableLoader(pipeline, seed=3, lanes=2, ledger=tmp_path / "ledger") as own:
        next(own)
        state, shown = own.state_dict(), repr(own)
    kept = [path.read_bytes() for path in (tmp_path / "ledger").rglob("*") if path.is_file()]
    assert kept and not any(b"hidden" in raw for raw in [*kept, shown.encode()])
    from savable_pipeline.run.state.fingerprint import unpack_fingerprint

    assert "hidden" not in str(unpack_fingerprint(state["fingerprint"]))


# Redirects.


def test_redirecting_bucket_is_rejected_before_credentials_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.tar").write_bytes(b"x" * 100)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden")
    with serving(tmp_path) as first, serving(tmp_path) as other:
        use_as_s3(first, monkeypatch)
        first.redirect = other.url
        with pytest.raises(RemoteError, match=r"redirects to http://127\.0\.0\.1:\d+/b\?….*AWS_ENDPOINT_URL"):
            ObjectStore(1.0).stat("s3://b", "a.tar")
        sent = [*first.headers, *other.headers]
        assert len(sent) == 1 and not any("hidden" in value for one in sent for value in one.values())
        first.redirect = ""
        found = ObjectStore(1.0).stat("s3://b", "a.tar")
        assert found is not None and found[0] == 100
        assert any(one.get("x-amz-security-token") == "hidden" for one in first.headers)


def test_web_server_may_redirect_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar").write_bytes(b"x" * 100)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hidden")
    with serving(tmp_path) as first, serving(tmp_path) as other:
        first.redirect = other.url
        found = ObjectStore(1.0).stat(first.url, "a.tar")
        assert found is not None and found[0] == 100
        assert other.headers and not any("authorization" in one or "hidden" in str(one) for one in other.headers)


# Other answers that are told as what they are.


def test_a_forbidden_shard_of_a_web_server_is_not_a_missing_one(
    tmp_path: Path, make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards([3, 3])
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_CACHE_BYTES", str(10**8))
    monkeypatch.setenv("SAVABLE_RETRY_S", "1")
    with serving(tmp_path) as server:
        server.fault = lambda path, number: "403" if path.endswith("0001.tar") else None
        with pytest.raises(RemoteError, match=r"0001\.tar: .*credentials"):
            sp.TarShardReader(f"{server.url}/shards/{{0000..0001}}.tar", sp.Lane())
        server.fault = lambda path, number: None if path.endswith(".tar") else "403"  # as buckets say of what is gone
        reader = sp.TarShardReader(f"{server.url}/shards/{{0000..0001}}.tar", sp.Lane(), epochs=1)
        assert sum(1 for _ in reader) == 6


@pytest.mark.parametrize("part", [(0, 2000), (10, 100)])
def test_a_server_that_compresses_what_it_sends_is_an_error_by_name_at_its_first_answer(
    tmp_path: Path, part: tuple[int, int]
) -> None:
    (tmp_path / "a.tar").write_bytes(b"0123456789" * 200)
    with serving(tmp_path) as server:
        server.fault = lambda path, number: "gzip"
        with pytest.raises(RemoteError, match="compressed as gzip"):
            ObjectStore(5.0).copy(server.url, "a.tar", *part, 2000, lambda chunk, offset: None)
        assert server.requests == 1


@pytest.mark.parametrize(("status", "indexed"), [("403", False), ("400", True)])
def test_forbidden_listed_shard_is_a_credential_error_at_once(
    tmp_path: Path, make_shards: MakeShards, monkeypatch: pytest.MonkeyPatch, status: str, indexed: bool
) -> None:
    """S3 says 400 for a token that has expired."""
    folder = make_shards([3, 3])
    if indexed:
        sp.open_dataset(folder)
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SAVABLE_RETRY_S", "600")  # a test that tries again ends with its time
    with serving(tmp_path) as server:
        use_as_s3(server, monkeypatch)
        server.fault = lambda path, number: status if path.endswith("0001.tar") else None
        with pytest.raises(
            RemoteError, match=rf"0001\.tar: .*status code: {status}.*Check the address and the credentials"
        ):
            [sample["json"] for sample in sp.open_dataset("s3://shards/")]

"""Datasets of the Hub are read in place, at one commit, with few questions and a token that the Hub alone gets."""

from __future__ import annotations

import itertools
import json
import shutil
import tarfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import savable_pipeline as sp
from savable_pipeline.data.dataset.info import dataset_info
from savable_pipeline.data.remote import hub as hub_module
from savable_pipeline.data.remote.hub import Hub
from savable_pipeline.data.remote.session import Session, close_scratch
from savable_pipeline.data.shards.paths import HubAddress, without_commit
from savable_pipeline.errors import RemoteError
from savable_pipeline.tools.check.dataset_check import check_dataset
from savable_pipeline.tools.convert import Options, run_conversion
from tests.support.toy_hub import ToyHub, local_hub

NAME = "hf://datasets/org/name"
ROWS = 20  # of a file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyHub]:
    with local_hub(tmp_path, monkeypatch) as served:
        yield served
    close_scratch()


def write(folder: Path, name: str, first: int) -> None:
    """A file of `ROWS` samples with the numbers from `first` on, too large for git."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": first + n, "txt": f"text {first + n} " * 20} for n in range(ROWS)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    elif name.endswith(".jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        with tarfile.open(folder / name, "w") as tar:
            for row in rows:
                member, data = tarfile.TarInfo(f"{row['id']:04d}.json"), json.dumps(row).encode()
                member.size = len(data)
                tar.addfile(member, BytesIO(data))


def repository(folder: Path, suffix: str = ".parquet") -> Path:
    """What people have on the Hub: two files of one split, in a folder, and what is always there."""
    folder.mkdir(exist_ok=True)
    (folder / ".gitattributes").write_text("*.parquet filter=lfs\n")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nA dataset.\n")
    for number in range(2):
        write(folder, f"data/train-0000{number}-of-00002{suffix}", number * ROWS)
    return folder


def ids(samples: Any) -> list[int]:
    return [int(s.json()["id"]) if "json" in s else int(s.json("id")) for s in samples]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".tar"])
def test_hub_dataset_is_read_by_name_and_the_token_is_sent_only_to_the_hub(
    hub: ToyHub, tmp_path: Path, suffix: str
) -> None:
    commit = hub.commit(repository(tmp_path / "repo", suffix))
    found = sp.open_dataset(NAME)
    assert ids(found) == list(range(2 * ROWS))
    assert found.dataset.address == f"{NAME}@{commit}"
    assert {token for path, token in zip(hub.asked, hub.tokens, strict=True) if "/datasets/" in path} == {
        "Bearer hf_toy"
    }
    assert hub.at_store and not any("authorization" in headers for headers in hub.at_store)
    assert hub.times("/revision/") == 1 and hub.times("/tree/") == 2  # pages
    assert all(hub.times(f"/resolve/{commit}/data/train-0000{n}") == 1 for n in range(2))


def test_commit_is_listed_once_per_node_and_cached_bytes_are_not_downloaded(hub: ToyHub, tmp_path: Path) -> None:
    commit = hub.commit(repository(tmp_path / "repo"))
    expected = ids(sp.open_dataset(f"{NAME}@{commit}/data"))
    hub.asked.clear(), hub.stored.clear()
    assert ids(sp.open_dataset(f"{NAME}@{commit}/data")) == expected
    assert not hub.times("/datasets/") and not hub.stored


def test_new_revision_downloads_only_new_files(hub: ToyHub, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    hub.commit(repo)
    assert ids(sp.open_dataset(NAME)) == list(range(2 * ROWS))
    (repo / "README.md").write_text("Other words.\n")
    hub.commit(repo)
    hub.stored.clear()
    assert ids(sp.open_dataset(NAME)) == list(range(2 * ROWS))
    assert not hub.stored
    write(repo, "data/train-00000-of-00002.parquet", 500)
    write(repo, "data/train-00002-of-00003.parquet", 2 * ROWS)
    (repo / "data/train-00001-of-00002.parquet").rename(repo / "data/train-00001-of-00003.parquet")
    hub.commit(repo)
    assert ids(sp.open_dataset(NAME)) == [*range(500, 500 + ROWS), *range(ROWS, 3 * ROWS)]
    sent = {name for name, _ in hub.stored}
    assert sent >= {"train-00000-of-00002.parquet", "train-00002-of-00003.parquet"}
    footer = sum(size for name, size in hub.stored if name == "train-00001-of-00003.parquet")
    assert footer == 0


def test_files_of_an_earlier_commit_are_read_again_by_the_same_process(hub: ToyHub, tmp_path: Path) -> None:
    repo, one_process = repository(tmp_path / "repo"), Session.of().connected()
    for name in ("data/train-00001-of-00002.parquet", "data/other.parquet", "data/train-00001-of-00002.parquet"):
        for path in (repo / "data").glob("*"):
            path.unlink()
        write(repo, name, 0)
        hub.commit(repo)
        assert ids(sp.open_dataset(NAME)) == list(range(ROWS))
    one_process.close()


def test_changed_tar_of_equal_size_in_another_commit_is_detected(hub: ToyHub, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo", ".tar")
    first = hub.commit(repo)
    assert ids(sp.open_dataset(NAME)) == list(range(2 * ROWS))
    write(repo, "data/train-00001-of-00002.tar", 2 * ROWS)
    hub.commit(repo)
    hub.stored.clear()
    assert ids(sp.open_dataset(NAME)) == [*range(ROWS), *range(2 * ROWS, 3 * ROWS)]
    assert {name for name, _ in hub.stored} == {"train-00001-of-00002.tar"}
    hub.stored.clear()
    assert ids(sp.open_dataset(f"{NAME}@{first}")) == list(range(2 * ROWS))
    assert not hub.stored


def test_expired_signed_url_is_renewed(hub: ToyHub, tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    pads = np.random.default_rng(0).bytes(4 << 16)
    table = pa.table({"id": range(4), "pad": [pads[n << 16 : n + 1 << 16] for n in range(4)]})
    pq.write_table(table, tmp_path / "repo/a.parquet", row_group_size=1, compression="none")
    hub.commit(tmp_path / "repo")
    found = sp.open_dataset(NAME)
    assert found[0]["pad"] == pads[: 1 << 16]
    hub.expired.update(range(100))
    hub.signatures = itertools.count(100)
    before = hub.times("HEAD")
    assert found[2]["pad"] == pads[2 << 16 : 3 << 16]
    assert hub.times("HEAD") == before + 1


class Clock:
    """A time that passes only where somebody sleeps; `meanwhile` is called in the first sleep."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        self.now, self.slept, self._meanwhile = 1e9, list[float](), meanwhile

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 1:
            self._meanwhile()
        self.now += seconds


def test_all_processes_of_a_node_obey_retry_after(hub: ToyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.commit(repository(tmp_path / "repo"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    (tmp_path / "cache").mkdir()
    first, second = Hub(tmp_path / "cache", 5.0), Hub(tmp_path / "cache", 5.0)
    hub.branches["v2"] = commit
    asked: list[int] = []

    def another_process_asks() -> None:
        asked.append(hub.times("/revision/"))
        assert second.commit(f"{NAME}@v2") == commit
        asked.append(hub.times("/revision/"))

    for hours, headers in enumerate(({"Retry-After": "70"}, {"RateLimit": '"api";r=0;t=70'})):
        hub.asked.clear(), asked.clear()
        clock = Clock(another_process_asks)
        clock.now += 3600 * hours
        monkeypatch.setattr(hub_module, "time", clock)
        hub.refuse = lambda path, number, said=headers: (429, said) if hub.times("/revision/") == 1 else None
        assert first.commit(f"{NAME}@main") == commit
        assert asked == [1, 2]  # the other one slept before it asked
        assert len(clock.slept) == 2 and all(70 <= seconds <= 72 for seconds in clock.slept)


def test_a_hub_that_answers_429_while_bytes_are_read_is_waited_for(hub: ToyHub, tmp_path: Path) -> None:
    hub.commit(repository(tmp_path / "repo"))
    refused = set[str]()

    def refuse(path: str, number: int) -> tuple[int, dict[str, str]] | None:
        first = "/datasets/" in path and path not in refused
        refused.add(path)
        return (429, {"Retry-After": "0"}) if first else None

    hub.refuse = refuse
    assert ids(sp.open_dataset(NAME)) == list(range(2 * ROWS))
    assert hub.times("/revision/") == 2


def gated(status: int) -> Callable[[str, int], tuple[int, dict[str, str]] | None]:
    return lambda path, number: (status, {"X-Error-Code": "GatedRepo"}) if "/resolve/" in path else None


NOT_THERE = {
    "hf://datasets/org/nobody": r"org/nobody.*: no such dataset, or a private one .*/datasets/org/nobody",
    f"{NAME}@v9": r"no revision 'v9'.*/org/name/tree/main for branches and tags",
    f"{NAME}/dada": r"/dada: not found in the dataset at this commit",
    f"{NAME}/data/x.parquet": r"/data/x\.parquet: not found in the dataset at this commit",
    f"{NAME}/data/*.tar": r"no shard matches\. Check the pattern",
    "hf://org/name": r"not a dataset of the Hub. Write hf://datasets/ORG/NAME",
}


def test_missing_or_forbidden_dataset_is_an_error(hub: ToyHub, tmp_path: Path) -> None:
    hub.commit(repository(tmp_path / "repo"))
    one_process = Session.of().connected()
    for address, told in NOT_THERE.items():
        with pytest.raises(sp.ShardError, match=told):
            sp.open_dataset(address)
    for status in (401, 403):
        hub.refuse = gated(status)
        told = rf"its terms are not accepted .*Accept them at {hub.url}/datasets/org/name, and set HF_TOKEN"
        with pytest.raises(RemoteError, match=told):
            sp.open_dataset(f"{NAME}/data")
    one_process.close()


def test_several_splits_are_rejected_with_the_names_to_choose_from(hub: ToyHub, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    write(repo, "data/test-00000-of-00001.parquet", 900)
    hub.commit(repo)
    one_process = Session.of().connected()
    by_names = r"2 splits .*\n/data/test-\*\.parquet \(test\), data/train-\*\.parquet \(train\)"
    with pytest.raises(sp.ShardError, match=by_names):
        sp.open_dataset(NAME)
    assert ids(sp.open_dataset(f"{NAME}/data/train-*.parquet")) == list(range(2 * ROWS))
    assert len(sp.open_dataset([f"{NAME}/data/test-*.parquet", f"{NAME}/data/train-*.parquet"])) == 3 * ROWS
    split = "{split: train, path: de/*}"
    configs = f"configs:\n- {{config_name: fr, data_files: fr/**}}\n- config_name: de\n  data_files: [{split}]"
    shutil.rmtree(repo / "data")
    for name in ("fr/0.parquet", "de/0.parquet"):
        write(repo, name, 0)
    (repo / "README.md").write_text(f"---\n{configs}\n---\nText.")
    hub.commit(repo)
    with pytest.raises(sp.ShardError, match=r"/fr/\*\*/\*\.parquet \(fr: train\), de/\*\.parquet \(de: train\)"):
        sp.open_dataset(NAME)
    assert len(sp.open_dataset(f"{NAME}/fr/**/*.parquet")) == len(sp.open_dataset(f"{NAME}/de")) == ROWS
    one_process.close()


def numbers(address: str, **settings: Any) -> sp.SavableLoader:
    pipeline = sp.read(address, epochs=1).shuffle(10).map(lambda sample: ids([sample])[0]).batch(2)
    return sp.SavableLoader(pipeline, seed=3, lanes=2, **settings)


def test_resumed_run_reads_its_original_commit(hub: ToyHub, tmp_path: Path) -> None:
    repo = repository(tmp_path / "repo")
    hub.commit(repo)
    with numbers(NAME) as loader:
        begun = [next(loader).tolist() for _ in range(4)]
        state = loader.state_dict()
        expected = begun + [batch.tolist() for batch in loader]
    write(repo, "data/train-00001-of-00002.parquet", 500)
    moved = hub.commit(repo)
    with numbers(NAME, num_workers=1) as loader:
        loader.load_state_dict(state)
        state = loader.state_dict()
        assert begun + [batch.tolist() for batch in loader] == expected
    with numbers(NAME) as loader:  # one that has started by the new commit already
        assert {number for batch in loader for number in batch.tolist()} == {*range(ROWS), *range(500, 500 + ROWS)}
        loader.load_state_dict(state)
        assert begun + [batch.tolist() for batch in loader] == expected
    with numbers(f"{NAME}@{moved}") as loader, pytest.raises(sp.CheckpointMismatchError, match="rewritten: "):
        loader.load_state_dict(state)


def test_commands_and_mixtures_accept_hub_addresses(
    hub: ToyHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.commit(repository(tmp_path / "repo"))
    info = dataset_info(NAME)
    assert (info.root, info.samples) == (f"{NAME}@{commit}", 2 * ROWS)
    assert check_dataset(NAME, processes=1).problems == []
    report = run_conversion(NAME, tmp_path / "shards", Options(), workers=1)
    assert report.samples == 2 * ROWS and [*(tmp_path / "shards").glob("*.tar")]
    (tmp_path / "mixture.yaml").write_text(f"sources: {{a: {{path: '{NAME}/data', weight: 1}}}}")
    assert sorted(ids(sp.mixture(tmp_path / "mixture.yaml").take(2 * ROWS))) == list(range(2 * ROWS))


def test_a_copy_of_an_opened_dataset_reads_the_same_commit(hub: ToyHub, tmp_path: Path) -> None:
    import pickle

    repo = repository(tmp_path / "repo")
    hub.commit(repo)
    found = sp.open_dataset(NAME)
    write(repo, "data/train-00001-of-00002.parquet", 500)
    hub.commit(repo)
    assert ids(pickle.loads(pickle.dumps(found))) == ids(found) == list(range(2 * ROWS))


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("hf://datasets/a/b", ("a/b", "main", "")),
        ("hf://datasets/a/b.c/", ("a/b.c", "main", "")),
        ("hf://datasets/a/b@v2/x/*.parquet", ("a/b", "v2", "x/*.parquet")),
        (
            "hf://datasets/a/b@refs/convert/parquet/default/0.parquet",
            ("a/b", "refs/convert/parquet", "default/0.parquet"),
        ),
        ("hf://datasets/a/b@refs%2Fpr%2F1/x", ("a/b", "refs/pr/1", "x")),
    ],
)
def test_an_address_has_a_dataset_a_revision_and_a_path(address: str, parts: tuple[str, ...]) -> None:
    found = HubAddress.of(address)
    assert found == parts
    assert without_commit(
        f"{found.at('1' * 40)} index"
    ) == f"{HubAddress(parts[0], '', parts[2]).at('')} index".replace("@", "")

"""A node that is not as the trainer is refused before the first batch, and what differs is named."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline.run.engine.sealed_job import main_module_data
from savable_pipeline.run.nodes import agent as node_agent
from savable_pipeline.run.nodes import agreement, wire
from savable_pipeline.run.transport.channel import Channel
from tests.conftest import write_numbered_shards
from tests.support.agents import Agent, write_key
from tests.support.toy_faults import number_pipeline

ENCODER = """
import own_lengths
from tests.support.toy_faults import NumberEncoder

class OwnEncoder(NumberEncoder):
    def length(self, item):
        return own_lengths.length(item)
"""
LENGTHS = "def length(item):\n    return {}\n"
SCRIPT = """
import sys
import savable_pipeline as sp
from own_encoders import OwnEncoder

if __name__ == "__main__":
    shards, key_file, address, *allow = sys.argv[1:]
    pipeline = sp.read(shards).encode(OwnEncoder()).batch(2)
    workers = sp.SocketWorkers([address], key_file=key_file, allow=allow)
    with sp.SavableLoader(pipeline, seed=3, lanes=6, workers=workers) as loader:
        try:
            print("batch", next(loader))
        except sp.WorkerError as error:
            print("refused", error)
"""


def written(folder: Path, length: int) -> Path:
    folder.mkdir()
    (folder / "own_encoders.py").write_text(ENCODER)
    (folder / "own_lengths.py").write_text(LENGTHS.format(length))
    return folder


def test_a_stale_source_file_of_the_user_is_named(tmp_path: Path) -> None:
    write_numbered_shards(tmp_path / "shards", [40])
    here, there = written(tmp_path / "here", 1), written(tmp_path / "there", 2)
    script = here / "train.py"
    script.write_text(SCRIPT)
    key_file = write_key(tmp_path)
    root = str(Path(__file__).parents[3])
    agent = Agent(key_file, 1, PYTHONPATH=f"{there}:{root}")

    def run(*allow: str) -> str:
        command = [sys.executable, str(script), str(tmp_path / "shards"), str(key_file), agent.address, *allow]
        environment = {**os.environ, "PYTHONPATH": root}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    try:
        refused = run()
        assert refused.startswith(f"refused the node {agent.address} differs from this machine")
        assert "module own_lengths: source" in refused and "own_encoders" not in refused
        assert "batch [" in run("module own_lengths")
    finally:
        agent.end()


@pytest.fixture(scope="module")
def here() -> tuple[agreement.Requirements, dict[str, Any]]:
    main = main_module_data()
    return agreement.requirements_of(pickle.dumps(partial(number_pipeline, "x")), main), main


def test_machine_agrees_with_itself_and_lists_the_facts(here: tuple[agreement.Requirements, dict[str, Any]]) -> None:
    manifest, main = here
    assert not agreement.unmet_requirements(manifest, main, [])
    assert {"savable_pipeline", "python", "processor", "numpy", "torch", "pillow"} <= manifest.keys()
    assert "module tests.support.toy_faults" in manifest and "module tests" in manifest
    assert "module savable_pipeline" not in manifest and "module numpy" not in manifest
    assert "(build " in manifest["pillow"] and "ORDER" in manifest["savable_pipeline"]


def test_every_compared_fact_may_differ_only_if_allowed(here: tuple[agreement.Requirements, dict[str, Any]]) -> None:
    manifest, main = here
    names = ["savable_pipeline", "python", "processor", "pillow", "module tests.support.toy_faults"]
    others = manifest | dict.fromkeys(names, "another")
    told = [f"{name}: {manifest[name]} there, another here" for name in names]
    assert sorted(agreement.unmet_requirements(others, main, [])) == sorted(told)
    assert agreement.unmet_requirements(others, main, names[1:]) == told[:1]


@pytest.mark.parametrize("library", ["pyarrow", "av", "tokenizers", "transformers", "torch"])
def test_libraries_that_affect_bytes_must_have_equal_releases(
    here: tuple[agreement.Requirements, dict[str, Any]], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, main = here
    build = agreement._build
    monkeypatch.setattr(agreement, "_build", lambda name: "0.1" if name == library else build(name))
    assert agreement.unmet_requirements(manifest, main, []) == [f"{library}: 0.1 there, {manifest[library]} here"]


def test_optional_decoder_must_be_installed_on_both_or_none(
    here: tuple[agreement.Requirements, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = here[1]
    build = agreement._build
    missing = {"simplejpeg", "pandas", "scipy"}
    monkeypatch.setattr(agreement, "_build", lambda name: "none" if name in missing else build(name))
    manifest = agreement.requirements_of(pickle.dumps(None), main)
    assert manifest["simplejpeg"] == "none" and not manifest.keys() & {"pandas", "scipy"}
    monkeypatch.setattr(agreement, "_build", lambda name: "2.0" if name == "simplejpeg" else build(name))
    assert agreement.unmet_requirements(manifest, main, []) == ["simplejpeg: 2.0 there, none here"]


def test_a_node_without_cryptography_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wire, "can_authenticate_bodies", lambda: False)
    found: list[tuple[int, bytes]] = []
    for trusted in (False, True):
        ours, theirs = socket.socketpair()
        node = node_agent.NodeSession(Channel(ours, blocking=False), 1)
        secret = wire.Secret(b"a" * 64, b"a" * 64, trusted)
        control = socket.socketpair()
        node._add_connection(control[0], secret)
        node._agree({}, [], [], b"", {})
        node._channel.close()
        theirs.close()
        found += [(frame.kind, bytes(frame.head)) for frame in wire.Link(control[1], secret).receive()]
        if node.host is not None:
            node.host.close()
    assert found == [
        (wire.REFUSED, b"cryptography: none there, and needed unless trusted_network=True"),
        (wire.AGREED, b"1"),
    ]


def test_missing_module_or_main_file_is_named(here: tuple[agreement.Requirements, dict[str, Any]]) -> None:
    manifest = {"module nowhere.at_all": "source 1", agreement.MAIN_MODULE: "source 2"}
    found = agreement.unmet_requirements(manifest, {"init_main_from_path": "/nowhere/train.py"}, [])
    assert found == [
        "module nowhere.at_all: no such file there, source 1 here",
        "module __main__: no file /nowhere/train.py there, source 2 here",
    ]


def test_unpicklable_pipeline_is_rejected_at_once(tmp_path: Path) -> None:
    workers = sp.SocketWorkers(["127.0.0.1:1"], key_file=write_key(tmp_path))
    with pytest.raises(ValueError, match="cannot be sent to other machines"):
        sp.SavableLoader(lambda lane: number_pipeline("x", lane), seed=3, workers=workers)

"""A state is refused by a run with other data or settings, field by field; what cannot change data is no matter."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.indexing import index_files
from savable_pipeline.data.stores.tar_store import TARS
from savable_pipeline.run.state.fingerprint import (
    Fingerprint,
    compare,
    fingerprint,
    pack_fingerprint,
    unpack_fingerprint,
)
from savable_pipeline.stages.pipeline import upstream
from tests.conftest import write_numbered_shards, write_tar
from tests.support.streams import next_hashes, through_a_file
from tests.support.toy_faults import NumberEncoder, number_pipeline
from tests.support.toy_pipelines import ToyEncoder, toy_pipeline

SETTINGS: dict[str, Any] = {"seed": 3, "lanes": 12}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fingerprint") / "shards"
    write_numbered_shards(folder, [40, 7, 60])
    return folder


@pytest.fixture
def own_shards(shards: Path, tmp_path: Path) -> Path:
    """A copy, for tests that change it."""
    copy = tmp_path / "shards"
    shutil.copytree(shards, copy)
    return copy


@pytest.fixture(scope="module")
def saved(shards: Path) -> dict[str, Any]:
    """The state of the toy pipeline after five batches."""
    loader = sp.SavableLoader(partial(toy_pipeline, str(shards)), **SETTINGS)
    next_hashes(loader, 5)
    return through_a_file(loader.state_dict())


def refusal(pipeline: Any, state: dict[str, Any], **settings: Any) -> str:
    """Why a run does not load the state."""
    with pytest.raises(sp.CheckpointMismatchError) as caught:
        sp.SavableLoader(pipeline, **{**SETTINGS, **settings}).load_state_dict(state)
    return str(caught.value)


# Each setting.


@pytest.mark.parametrize(
    "changed,field,before,here",
    [
        ({"epochs": 1}, "TarShardReader.epochs", "None", "1"),
        ({"shuffle": False}, "TarShardReader.shuffle", "True", "False"),
        ({"block_size": 4}, "TarShardReader.block_size", "8", "4"),
        ({"window": 2}, "TarShardReader.window", "32", "2"),
        ({"window": None}, "TarShardReader.window", "32", "None"),
        ({"buffer": 11}, "ShuffleBuffer.size", "10", "11"),
        ({"skip": 6}, "Encode.encoder.skip", "7", "6"),
        ({"fan_out": 6}, "Encode.encoder.fan_out", "5", "6"),
        ({"max_length": 21}, "OnlinePacker.max_length", "20", "21"),
        ({"pack": "first_fit"}, "OnlinePacker.policy", "'best_fit'", "'first_fit'"),
        ({"pack": "first_fit_decreasing"}, "OnlinePacker.policy", "'best_fit'", "'first_fit_decreasing'"),
        ({"open_packs": 4}, "OnlinePacker.open_packs", "3", "4"),
        ({"size": 3}, "batch_size", "2", "3"),
        ({"drop_last": True}, "Batcher.drop_last", "False", "True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_different_setting_is_reported_with_both_values(
    shards: Path, saved: dict[str, Any], changed: dict[str, Any], field: str, before: str, here: str
) -> None:
    pipeline = partial(toy_pipeline, str(shards), **changed)
    told = refusal(pipeline, saved)
    assert f"  {field}: saved {before}, here {here}\n" in told
    assert f"without exactness, pass allow=['{field}'" in told
    others = [line for line in told.splitlines() if line.startswith("  ") and field not in line]
    assert not others or changed == {"shuffle": False}  # then there is no window either


@pytest.mark.parametrize("changed,field,here", [({"seed": 4}, "seed", "4"), ({"lanes": 24}, "lanes", "24")])
def test_another_seed_or_number_of_lanes_is_named(
    shards: Path, saved: dict[str, Any], changed: dict[str, Any], field: str, here: str
) -> None:
    told = refusal(partial(toy_pipeline, str(shards)), saved, **changed)
    assert f"  {field}: saved {SETTINGS[field]}, here {here}" in told
    assert ("the number of lanes is a setting of the run: pass the saved one" in told) == (field == "lanes")
    assert ("allow=" in told) == (field == "seed")


def test_every_setting_at_once_is_listed(shards: Path, saved: dict[str, Any]) -> None:
    told = refusal(partial(toy_pipeline, str(shards), size=3, buffer=5), saved, seed=4)
    assert [line.split(":")[0] for line in told.splitlines() if line.startswith("  ")] == [
        "  ShuffleBuffer.size",
        "  batch_size",
        "  seed",
    ]


@pytest.mark.parametrize("changed", [{"buffer": None}, {"pack": None}])
def test_removed_or_added_stage_is_reported_without_its_settings(
    shards: Path, saved: dict[str, Any], changed: dict[str, Any]
) -> None:
    whole = "['TarShardReader', 'ShuffleBuffer', 'Encode', 'OnlinePacker', 'Batcher']"
    missing = "ShuffleBuffer" if "buffer" in changed else "OnlinePacker"
    part = whole.replace(f"'{missing}', ", "")
    with_less = partial(toy_pipeline, str(shards), **changed)
    told = refusal(with_less, saved)
    assert f"  stages: saved {whole}, here {part} (a stage was added, removed or exchanged)" in told
    assert "allow=" not in told and f"{missing}." not in told
    told = refusal(partial(toy_pipeline, str(shards)), sp.SavableLoader(with_less, **SETTINGS).state_dict())
    assert f"  stages: saved {part}, here {whole}" in told


# The encoder.


class RenamedEncoder(ToyEncoder):
    """The same under another name."""


def encoder_state(shards: Path, encoder: sp.TaskEncoder) -> dict[str, Any]:
    return sp.SavableLoader(partial(number_pipeline, str(shards), encoder=encoder), **SETTINGS).state_dict()


def test_another_class_of_encoder_is_named(shards: Path) -> None:
    told = refusal(partial(number_pipeline, str(shards), encoder=RenamedEncoder()), encoder_state(shards, ToyEncoder()))
    assert "  Encode.encoder: saved 'ToyEncoder', here 'RenamedEncoder'" in told


class SettingsEncoder(NumberEncoder):
    """Has the settings that it is given."""

    def __init__(self, settings: Any) -> None:
        self.given = settings

    def settings(self) -> dict[str, Any]:
        return self.given  # type: ignore[no-any-return]


@dataclass
class Crop:
    size: int
    mean: tuple[float, ...]


@pytest.mark.parametrize(
    "value",
    [
        (0.485, 0.456, 0.406),
        {"b", "a", "c", "d", "e"},
        frozenset(range(50)),
        {2: "two", 1: "one"},
        {"z": 1, "a": {"c", "b"}},
        [(1, 2), [3]],
        b"\x00\xff",
        None,
        2**63,
        -(2**63),
        1e300,
        Crop(224, (0.5, 0.5)),
    ],
    ids=lambda value: type(value).__name__,  # a set has no fixed order
)
def test_setting_of_any_plain_type_round_trips(shards: Path, value: Any) -> None:
    encoder = SettingsEncoder({"value": value})
    state = through_a_file(encoder_state(shards, encoder))
    pipeline = partial(number_pipeline, str(shards), encoder=encoder)
    sp.SavableLoader(pipeline, **SETTINGS).load_state_dict(state)
    other = SettingsEncoder({"value": "other"})
    assert "Encode.encoder.value: saved" in refusal(partial(number_pipeline, str(shards), encoder=other), state)


def test_set_is_saved_in_an_order_independent_of_hashes(shards: Path) -> None:
    """The hash of a text differs from interpreter to interpreter, and with it the order of a set."""
    names = {f"name {i}" for i in range(30)}
    stage = number_pipeline(str(shards), sp.Lane(), encoder=SettingsEncoder({"names": names, "deep": {"n": names}}))
    fields = fingerprint(stage, seed=3, lanes=12).fields
    assert fields["Encode.encoder.names"] == fields["Encode.encoder.deep"]["n"] == sorted(names)


@pytest.mark.parametrize("value", [np.float32(1), object(), Path("a"), 2**70], ids=lambda value: type(value).__name__)
def test_setting_that_cannot_be_saved_is_an_error_that_names_it(shards: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"the setting Encode\.encoder\.value = .*cannot be saved"):
        encoder_state(shards, SettingsEncoder({"value": value}))


def test_added_or_removed_setting_is_reported_and_can_be_allowed(shards: Path) -> None:
    less, more = SettingsEncoder({"a": 1}), SettingsEncoder({"a": 1, "b": 2})
    for before, here, told in ((less, more, "saved None, here 2"), (more, less, "saved 2, here None")):
        state = encoder_state(shards, before)
        pipeline = partial(number_pipeline, str(shards), encoder=here)
        assert f"  Encode.encoder.b: {told}" in refusal(pipeline, state)
        sp.SavableLoader(pipeline, **SETTINGS).load_state_dict(state, allow=["Encode.encoder.b"])


@pytest.mark.parametrize("name", ["lanes", "shards", "stages", "seed", "of/lanes", "of/order"])
def test_encoder_setting_may_have_the_name_of_ours(shards: Path, name: str) -> None:
    state = encoder_state(shards, SettingsEncoder({name: 1}))
    pipeline = partial(number_pipeline, str(shards), encoder=SettingsEncoder({name: 2}))
    assert f"  Encode.encoder.{name}: saved 1, here 2\n" in refusal(pipeline, state)
    sp.SavableLoader(pipeline, **SETTINGS).load_state_dict(state, allow=[f"Encode.encoder.{name}"])


def test_encoder_setting_hides_no_setting_of_its_stage(shards: Path) -> None:
    """An image encoder has a `size`, a text encoder a `max_length`."""

    def pipeline(lane: sp.Lane, size: int = 2, max_length: int = 8, own: int = 224) -> custom.Stage:
        items = sp.Encode(sp.TarShardReader(str(shards), lane), NumberEncoder())
        packs = sp.OnlinePacker(items, max_length=max_length, encoder=SettingsEncoder({"max_length": own}))
        return sp.Batcher(packs, size=size, encoder=SettingsEncoder({"size": own}))

    state = sp.SavableLoader(pipeline, **SETTINGS).state_dict()
    assert "  batch_size: saved 2, here 3\n" in refusal(partial(pipeline, size=3), state)
    assert "  OnlinePacker.max_length: saved 8, here 9\n" in refusal(partial(pipeline, max_length=9), state)
    assert "  Batcher.encoder.size: saved 224, here 256\n" in refusal(partial(pipeline, own=256), state)


# The data.


def test_shards_that_were_added_removed_or_rewritten_are_named(own_shards: Path, saved: dict[str, Any]) -> None:
    shards = own_shards
    pipeline = partial(toy_pipeline, str(shards))
    original = (shards / "0001.tar").read_bytes()
    members = [(f"s{i:06d}.json", b'{"id": 40}') for i in range(20)]
    changes: list[tuple[Callable[[], Any], str]] = [
        (lambda: shutil.copy(shards / "0001.tar", shards / "0007.tar"), "added: 0007.tar"),
        (lambda: (shards / "0007.tar").unlink(), ""),
        (lambda: write_tar(shards / "0001.tar", members), "rewritten: 0001.tar"),
        (lambda: (shards / "0001.tar").unlink(), "removed: 0001.tar"),
        (lambda: shutil.copy(shards / "0000.tar", shards / "0003.tar"), "added: 0003.tar; removed: 0001.tar"),
    ]
    for change, expected in changes:
        change()
        index_files(shards, TARS)  # forgets those that are gone
        loader = sp.SavableLoader(pipeline, **SETTINGS)
        if not expected:
            loader.load_state_dict(saved)
            continue
        told = refusal(pipeline, saved)
        joining = expected == "added: 0007.tar"
        hint = 'new shards may join at the next epoch: allow={"shards"}'
        cause = hint if joining else "shards were added, removed or rewritten since"
        assert f"  TarShardReader.shards: {expected} ({cause})" in told
        assert ("allow=" in told) == joining
    (shards / "0003.tar").unlink()
    (shards / "0001.tar").write_bytes(original)
    index_files(shards, TARS)
    sp.SavableLoader(pipeline, **SETTINGS).load_state_dict(saved)


def test_a_state_of_other_data_names_both_folders(shards: Path, saved: dict[str, Any], make_shards: Any) -> None:
    elsewhere = make_shards([40, 7, 61], "elsewhere")
    told = refusal(partial(toy_pipeline, str(elsewhere)), saved)
    assert f"rewritten since); saved on {shards}, here {elsewhere}\n" in told + "\n"


def test_state_without_a_data_path_is_rejected_with_the_current_folder(
    shards: Path, own_shards: Path, saved: dict[str, Any]
) -> None:
    old = unpack_fingerprint(saved["fingerprint"])
    assert old.addresses == {"TarShardReader.shards": str(shards)}
    old.addresses = {}
    (own_shards / "0001.tar").unlink()
    index_files(own_shards, TARS)
    told = refusal(partial(toy_pipeline, str(own_shards)), {**saved, "fingerprint": pack_fingerprint(old)})
    assert f"removed: 0001.tar (shards were added, removed or rewritten since); here {own_shards}" in told


def test_the_states_of_ranks_that_mount_the_data_elsewhere_are_merged_and_loaded(shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "mounted")
    states = []
    for rank, folder in enumerate([shards, tmp_path / "mounted"]):
        loader = sp.SavableLoader(partial(toy_pipeline, str(folder)), **SETTINGS, ranks=(rank, 2))
        next_hashes(loader, 2)
        states.append(loader.state_dict())
    assert states[0]["fingerprint"] != states[1]["fingerprint"]
    whole = sp.SavableLoader(partial(toy_pipeline, str(shards)), **SETTINGS)
    expected = next_hashes(whole, 8)[4:]
    for order in (states, states[::-1]):
        resumed = sp.SavableLoader(partial(toy_pipeline, str(shards)), **SETTINGS)
        resumed.load_state_dict(through_a_file(sp.merge_states(order)))
        assert next_hashes(resumed, 4) == expected


def test_the_states_of_runs_with_other_settings_are_not_merged(shards: Path) -> None:
    states = [
        sp.SavableLoader(partial(toy_pipeline, str(shards)), seed=seed, lanes=12, ranks=(0, 2)).state_dict()
        for seed in (1, 2)
    ]
    with pytest.raises(sp.CheckpointMismatchError, match="the states to merge differ in fingerprint"):
        sp.merge_states(states)


def test_password_in_a_url_is_not_saved(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = toy_pipeline(str(shards), sp.Lane())
    reader = next(upstream(stage))
    assert isinstance(reader, sp.TarShardReader)
    monkeypatch.setattr(reader.dataset, "address", "https://me:secret@host/a@b")
    found = fingerprint(stage, seed=3, lanes=12)
    assert found.addresses == {"TarShardReader.shards": "https://host/a@b"}


def test_many_shards_that_differ_are_counted(make_shards: Any) -> None:
    folder = make_shards([2] * 9)
    state = sp.SavableLoader(partial(toy_pipeline, str(folder)), **SETTINGS).state_dict()
    for shard in range(8):
        (folder / f"{shard:04d}.tar").unlink()
    index_files(folder, TARS)
    told = refusal(partial(toy_pipeline, str(folder)), state)
    assert "removed: 0000.tar, 0001.tar, 0002.tar, 0003.tar, 0004.tar and 3 more (" in told


def test_moved_touched_or_copied_data_are_equal(own_shards: Path, saved: dict[str, Any], tmp_path: Path) -> None:
    shards = own_shards
    elsewhere = tmp_path / "other" / "place"
    elsewhere.parent.mkdir()
    shutil.copytree(shards, elsewhere)
    for path in shards.glob("*.tar"):
        os.utime(path, (1, 1))
    expected = next_hashes(resumed(partial(toy_pipeline, str(shards)), saved), 9)
    assert next_hashes(resumed(partial(toy_pipeline, str(elsewhere)), saved), 9) == expected
    shutil.rmtree(elsewhere / ".nv-meta")
    assert next_hashes(resumed(partial(toy_pipeline, str(elsewhere)), saved), 9) == expected
    assert next_hashes(resumed(partial(toy_pipeline, str(elsewhere) + "/{0000..0002}.tar"), saved), 9) == expected


def resumed(pipeline: Any, state: dict[str, Any], **settings: Any) -> sp.SavableLoader:
    loader = sp.SavableLoader(pipeline, **{**SETTINGS, **settings})
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize(
    "settings",
    [
        {"num_workers": 2, "workers": sp.Workers(prefetch=7)},
        {"num_workers": 1, "workers": sp.Workers(start_method="spawn")},
        {"pin_memory": True},
        {"workers": sp.Workers(timeout=5.0)},
        {"ranks": (1, 2)},
    ],
    ids=str,
)
def test_settings_that_cannot_change_data_may_differ(
    shards: Path, saved: dict[str, Any], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        resumed(partial(toy_pipeline, str(shards)), saved, **settings).close()
    assert not caplog.records


def test_a_shard_rewritten_with_the_same_size_is_named(own_shards: Path, saved: dict[str, Any]) -> None:
    shards = own_shards
    size = (shards / "0001.tar").stat().st_size
    write_tar(shards / "0001.tar", [("s000040.json", b'{"id": 40}')])
    assert (shards / "0001.tar").stat().st_size == size
    assert "rewritten: 0001.tar" in refusal(partial(toy_pipeline, str(shards)), saved)


# What may differ.


def test_an_allowed_field_may_differ_and_is_a_warning(
    shards: Path, saved: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = sp.SavableLoader(partial(toy_pipeline, str(shards), size=3), **SETTINGS)
    with caplog.at_level(logging.WARNING):
        loader.load_state_dict(saved, allow={"batch_size"})
    assert [record.getMessage() for record in caplog.records] == [
        "restored although batch_size differs: saved 2, here 3"
    ]
    assert len(next(loader)["items"]) == 3
    loader.load_state_dict(saved, allow="batch_size")


def test_an_allowed_field_does_not_allow_another(shards: Path, saved: dict[str, Any]) -> None:
    loader = sp.SavableLoader(partial(toy_pipeline, str(shards), size=3, buffer=20), **SETTINGS)
    with pytest.raises(sp.CheckpointMismatchError, match=r"ShuffleBuffer\.size: saved 10, here 20") as caught:
        loader.load_state_dict(saved, allow=["batch_size"])
    assert "batch_size" not in str(caught.value)
    loader.load_state_dict(saved, allow=["batch_size", "ShuffleBuffer.size"])


@pytest.mark.parametrize("name", ["size", "Batcher.size", "batchsize", ""])
def test_unknown_field_is_an_error_that_lists_the_known_ones(shards: Path, saved: dict[str, Any], name: str) -> None:
    loader = sp.SavableLoader(partial(toy_pipeline, str(shards)), **SETTINGS)
    with pytest.raises(ValueError, match=rf"allow='{name}' is no field. The fields are .*batch_size.*, seed, "):
        loader.load_state_dict(saved, allow=[name])


@pytest.mark.parametrize("name", ["lanes", "stages", "TarShardReader.shards"])
def test_fields_that_may_never_differ_cannot_be_allowed(shards: Path, saved: dict[str, Any], name: str) -> None:
    loader = sp.SavableLoader(partial(toy_pipeline, str(shards)), **SETTINGS)
    with pytest.raises(ValueError, match=f"allow='{name}' is not possible: "):
        loader.load_state_dict(saved, allow=[name])


def test_other_libraries_or_processors_are_a_warning_and_no_error(
    shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = fingerprint(toy_pipeline(str(shards), sp.Lane()), seed=3, lanes=12)
    before = msgspec.structs.replace(here, environment={**here.environment, "pillow": "0.1", "machine": "vax"})
    with caplog.at_level(logging.WARNING):
        compare(before, here)
    machine, pillow = platform.machine(), version("pillow")
    assert [record.getMessage() for record in caplog.records] == [
        f"the state was saved with machine vax (here {machine}), pillow 0.1 (here {pillow}), so batches may differ. "
        "Install the saved versions to be exact."
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_added_or_removed_optional_library_is_a_warning(
    installed: bool, shards: Path, caplog: pytest.LogCaptureFixture
) -> None:
    here = fingerprint(toy_pipeline(str(shards), sp.Lane()), seed=3, lanes=12)
    without = {name: version for name, version in here.environment.items() if name != "simplejpeg"}
    here = msgspec.structs.replace(here, environment={**without, "simplejpeg": "1.9.0"} if installed else without)
    before = msgspec.structs.replace(here, environment=without)
    with caplog.at_level(logging.WARNING):
        compare(before, here)
    assert ("saved with simplejpeg none (here 1.9.0), so batches may differ" in caplog.text) is installed


@pytest.mark.parametrize("library", ["pillow", "simplejpeg", "av", "torch", "pyarrow", "tokenizers", "transformers"])
def test_each_library_that_decides_bytes_is_recorded(library: str, shards: Path) -> None:
    environment = fingerprint(toy_pipeline(str(shards), sp.Lane()), seed=3, lanes=12).environment
    assert environment[library] == version(library)


# The bytes.


def test_packed_fingerprint_unpacks_to_an_equal_fingerprint(shards: Path) -> None:
    here = fingerprint(toy_pipeline(str(shards), sp.Lane()), seed=3, lanes=12)
    assert unpack_fingerprint(pack_fingerprint(here)) == Fingerprint(here.fields, here.environment, here.addresses)


def test_a_fingerprint_of_a_thousand_shards_stays_small() -> None:
    shards = [[f"shards/{i:06d}.tar", 1000, i * 0x9E3779B97F4A7C15 % 2**64] for i in range(1000)]
    packed = pack_fingerprint(Fingerprint({"TarShardReader.shards": shards}, {}))
    assert len(packed) < 20_000


def test_two_stages_of_one_class_have_separate_fields(shards: Path) -> None:
    stage = sp.ShuffleBuffer(sp.ShuffleBuffer(sp.TarShardReader(str(shards), sp.Lane()), size=3), size=5)
    fields = fingerprint(stage, seed=3, lanes=1).fields
    assert (fields["ShuffleBuffer.size"], fields["ShuffleBuffer.size#2"]) == (3, 5)

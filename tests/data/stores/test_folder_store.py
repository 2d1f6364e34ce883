"""A folder of files, read in place: by what `os.walk` finds there, as it is converted, and with its changes told."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections import defaultdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.datasets import ImageFolder
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.data.shards.indexing import index_paths
from savable_pipeline.data.stores import folder_store
from savable_pipeline.data.stores.folder_store import FolderFormat
from savable_pipeline.errors import CheckpointMismatchError, ShardError
from savable_pipeline.testing import assert_exact_resume
from savable_pipeline.tools.cli.main import app
from tests.support.draws import scaled_examples
from tests.support.toy_files import write_captioned_images

NAMES = st.builds("{}/{}.{}".format, st.sampled_from(["a", "b/c", "a-b"]), st.sampled_from("xyz"), st.sampled_from(
    ["txt", "json", "seg.txt", "TXT2"]))  # fmt: skip


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'"{name}"')
    return folder


def walked(folder: Path, *, last: bool = False) -> dict[str, dict[str, bytes]]:
    """The samples, by key and extension, as `os.walk` and a dot make them."""
    found: dict[str, dict[str, bytes]] = defaultdict(dict)
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        for name in files:
            stem, _, extension = name.rpartition(".") if last else name.partition(".")
            key = os.path.relpath(Path(here, stem), folder)
            found[key][extension] = Path(here, name).read_bytes()
    return {key: dict(sorted(found[key].items())) for key in sorted(found)}


def opened(folder: Path, **settings: object) -> dict[str, dict[str, bytes]]:
    samples = sp.open_dataset(folder, **settings)  # type: ignore[arg-type]
    return {sample.key: {part: sample[part] for part in sample} for sample in samples}


@scaled_examples(8)
@given(names=st.sets(NAMES, min_size=1), last=st.booleans())
def test_samples_equal_those_of_os_walk(tmp_path_factory: pytest.TempPathFactory, names: set[str], last: bool) -> None:
    folder = write(tmp_path_factory.mktemp("in"), *names)
    found = opened(folder, key_end="last" if last else "first")
    expected = walked(folder, last=last)
    assert found == expected and list(found) == list(expected)


def test_samples_and_classes_equal_converted_ones(tmp_path: Path) -> None:
    images = write_captioned_images(tmp_path / "in/images", 8)
    source = write(images.parent, "cat/0.txt", "cat/1.json", "dog/0.txt", ".hidden", "no_extension", "README.md")
    (source / "cat/empty.jpg").touch()
    for each in ({}, {"classes": True}, {"key_end": "last"}):
        sp.convert(source, tmp_path / str(each), **each)  # type: ignore[arg-type]
        inside = opened(source, **each)
        written = opened(tmp_path / str(each))
        assert {key: inside[key] for key in written} == written
        assert set(inside) - set(written) <= {key for key in inside if "/" not in key}, "no class of their own"


def test_dataset_has_random_access_and_reports_rejected_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path, "a/0.txt", "a/1.txt", "no_extension")
    samples = sp.open_dataset(folder)
    assert (len(samples), samples[1].key, samples["a/0"].text(), samples[-1]["TXT"]) == (
        2,
        "a/1",
        '"a/0.txt"',
        b'"a/1.txt"',
    )
    assert "1 file left out with the samples of their names: no_extension: no extension" in caplog.text
    with samples[0].open("txt") as file:
        assert file.read(3) == b'"a/'
    with pytest.raises(KeyError, match="no part 'jpg'; the sample has txt"):
        samples[0]["jpg"]


class Texts(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> tuple[str, bytes, float]:
        return sample.key, sample["cls"], rng.random()


def texts(folder: Path, lane: sp.Lane) -> sp.BatchStage:
    reader = custom.FolderReader(folder, lane, classes=True)
    return sp.Batcher(sp.Encode(sp.ShuffleBuffer(reader, size=7), Texts()), size=3)


def test_resumes_with_classes_are_exact(tmp_path: Path) -> None:
    write(tmp_path, *(f"{name}/{i:02d}.txt" for name in "abc" for i in range(20)))
    assert assert_exact_resume(partial(texts, tmp_path), seed=3, lanes=2, steps=6, chains=1)


def test_file_changed_during_a_run_is_an_error_and_read_again_at_the_next_start(tmp_path: Path) -> None:
    folder = write(tmp_path, "a.txt", "b.txt")
    samples = sp.open_dataset(folder)
    stat = (folder / "b.txt").stat()
    (folder / "b.txt").write_text('"B.txt"')
    with pytest.raises(ShardError, match=r"b\.txt: 7 bytes when indexed, 7 now"):
        samples[1]["txt"]
    assert sp.open_dataset(folder)[1]["txt"] == b'"B.txt"'
    (folder / "b.txt").write_text('"b.txt"')
    os.utime(folder / "b.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert samples[1]["txt"] == b'"b.txt"', "put back, it is the one that was indexed"
    (folder / "b.txt").unlink()
    with pytest.raises(ShardError, match=r"No such file or directory. It was there when indexed"):
        samples[1]["txt"]
    os.mkfifo(folder / "b.txt")
    with pytest.raises(ShardError):  # and is not waited for
        samples[1]["txt"]


def state_after(folder: Path, steps: int, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The state of a run after some steps, and its next batches."""
    with sp.SavableLoader(of_texts(folder, **options), seed=1, lanes=4) as loader:
        list(islice(loader, steps))
        return loader.state_dict(), list(islice(loader, 6))


def goes_on(folder: Path, state: dict[str, Any], **options: Any) -> list[Any]:
    with sp.SavableLoader(of_texts(folder, **options), seed=1, lanes=4) as loader:
        loader.load_state_dict(state)
        return list(islice(loader, 6))


def of_texts(folder: Path, **options: Any) -> Any:
    return sp.read(folder, **options).map(lambda sample: sample.text()).batch(4)


def test_run_resumes_on_a_copy_of_the_folder(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        write(folder, *(f"{i:02d}.txt" for i in range(40)))
    state, expected = state_after(tmp_path / "one", 2)
    assert goes_on(tmp_path / "two", state) == expected


@pytest.mark.parametrize("change", ["added", "renamed", "longer", "another part"])
def test_a_state_of_other_files_is_rejected(tmp_path: Path, change: str) -> None:
    folder = write(tmp_path, *(f"{i:02d}.txt" for i in range(40)), "39.json")
    state, _ = state_after(folder, 2)
    if change == "added":
        write(folder, "new.txt")
    elif change == "renamed":
        (folder / "39.txt").rename(folder / "40.txt")
    elif change == "another part":
        (folder / "39.json").rename(folder / "39.text")
    else:
        (folder / "39.txt").write_text("a longer text than before")
    with pytest.raises(CheckpointMismatchError, match="shards"):
        goes_on(folder, state)


def test_index_of_many_files_is_trusted_until_a_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_store, "_FEW_FILES", 3)
    folder = write(tmp_path, *(f"{name}/{i}.txt" for name in "ab" for i in range(3)))
    old = time.time() - 60
    for each in ("a", "b", ""):
        os.utime(folder / each, (old, old))
    assert len(sp.open_dataset(folder)) == 6
    scans: list[str] = []
    scan = FolderFormat.scan
    monkeypatch.setattr(FolderFormat, "scan", lambda *given: scans.append("") or scan(*given))
    assert len(sp.open_dataset(folder)) == 6 and not scans
    write(folder, "b/new.txt")
    assert len(sp.open_dataset(folder)) == 7 and scans
    index_paths(folder, folder_store.FOLDER.index_name, near=False)[0].write_bytes(b"damaged")
    assert len(sp.open_dataset(folder)) == 7


def test_run_resumed_without_a_lost_file_has_the_other_samples(tmp_path: Path) -> None:
    folder = write(tmp_path, *(f"{i:02d}.txt" for i in range(40)))
    state, expected = state_after(folder, 2, on_error="skip")
    lost = expected[2][1]
    (folder / lost[1:7]).unlink()
    for _ in range(2):  # the index stays, also after it was found to be missing
        found = goes_on(folder, state, on_error="skip")
        assert all(lost not in batch for batch in found) and found[:2] == expected[:2]
    assert len(sp.open_dataset(folder)) == 39


def test_keys_are_found_for_each_end_of_keys(tmp_path: Path) -> None:
    folder = write(tmp_path, "a.b.txt", "c.d.txt")
    for end, key in (("first", "a"), ("last", "a.b"), ("first", "c")):
        assert sp.open_dataset(folder, key_end=end)[key].key == key  # type: ignore[arg-type]


def labels(folder: Path, classes: Any) -> dict[str, int | None]:
    samples = sp.open_dataset(folder, classes=classes)
    return {sample.key: int(sample["cls"]) if "cls" in sample else None for sample in samples}


def test_classes_equal_torchvisions(tmp_path: Path) -> None:
    names = ["z/0", "Z/0", "b/z/0", "b/a/1", "10/0", "9/0", "é/0", "c/d/e/0"]
    write(tmp_path, *(f"{name}.jpg" for name in names))
    (tmp_path / "a").mkdir()  # has a number too
    there = ImageFolder(tmp_path, allow_empty=True)
    expected = {os.path.relpath(path, tmp_path).removesuffix(".jpg"): label for path, label in there.samples}
    assert labels(tmp_path, True) == expected and set(expected) == set(names)


@pytest.fixture
def splits(tmp_path: Path) -> Path:
    """Training data with a folder in one of its classes, and validation data without one of them."""
    write(tmp_path / "train", "animals/0.jpg", "animals/birds/1.jpg", "bikes/0.jpg", "cars/0.jpg")
    write(tmp_path / "val", "animals/2.jpg", "cars/2.jpg")
    return tmp_path


def test_other_splits_use_class_indices_of_a_list_file_or_training_folder(splits: Path) -> None:
    names = ["animals", "bikes", "cars"]
    (splits / "names.json").write_text(json.dumps(names))
    (splits / "names.txt").write_text("\n".join(names))
    expected = {"animals/2": 0, "cars/2": 2}
    for classes in (names, splits / "names.json", str(splits / "names.txt"), splits / "train"):
        assert labels(splits / "val", classes) == expected
        samples = sp.read(splits / "val", classes=classes, epochs=1)
        assert {sample.key: int(sample["cls"]) for sample in samples} == expected
        sp.convert(splits / "val", splits / "out", classes=classes, check_images=False)
        written = sp.open_dataset(splits / "out")
        assert {sample.key: int(sample["cls"]) for sample in written} == expected
        shutil.rmtree(splits / "out")
    command = ["convert", str(splits / "val"), str(splits / "out"), "--classes-from", str(splits / "train")]
    assert CliRunner().invoke(app, [*command, "--no-check-images"]).exit_code == 0
    assert json.loads((splits / "out/classes.json").read_text()) == names


def test_list_of_classes_has_one_name_a_line_and_keeps_line_separators_in_names(splits: Path) -> None:
    names = ["animals", "bikes\u2028red", "cars"]
    for end in ("\n", "\r\n"):
        (splits / "names.txt").write_bytes((end.join(names) + end).encode())
        assert labels(splits / "val", splits / "names.txt") == {"animals/2": 0, "cars/2": 2}


@pytest.mark.parametrize(
    ("classes", "extra", "told"),
    [
        (True, "train/0.jpg", r"no class has a folder here, only splits have \(train\)\. Read each split by itself"),
        (True, "loose.jpg", "loose.jpg is in no folder, so it has no class"),
        (["a", "b"], "loose.jpg", "loose.jpg is in no folder, so it has no class"),
        (["a", "b"], "new/0.jpg", "the samples in new have no class. Move them"),
        (["a", "a"], "a/0.jpg", "pass the names of the folders in their order, each once"),
        ("missing", "a/0.jpg", "No such file or directory"),
    ],
)
def test_samples_without_a_class_are_rejected(tmp_path: Path, classes: Any, extra: str, told: str) -> None:
    folder = write(tmp_path / "in", extra) if "train" in extra else write(tmp_path / "in", "a/1.jpg", extra)
    with pytest.raises((ShardError, ValueError), match=told):
        sp.open_dataset(folder, classes=classes)


def test_another_list_of_classes_is_a_mismatch_and_logged(splits: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def run(state: Any = None) -> Any:
        pipeline = sp.read(splits / "val", classes=splits / "train").map(lambda sample: int(sample["cls"]))
        with sp.SavableLoader(pipeline.batch(1), seed=1, lanes=1) as loader:
            if state is not None:
                loader.load_state_dict(state)
            next(loader)
            return loader.state_dict()

    state = run()
    assert caplog.text.count("val: 3 classes: animals, bikes, cars") == 1
    run(state)
    (splits / "train/boats").mkdir()
    with pytest.raises(CheckpointMismatchError, match=r"FolderReader\.classes: .*animals.*boats"):
        run(state)


def test_worker_that_finds_other_classes_is_an_error(splits: Path) -> None:
    pinned: dict[str, bytes] = {}
    opened = sp.open_dataset(splits / "val", classes=splits / "train")
    opened.pinned(pinned)
    (splits / "train/boats").mkdir()
    with pytest.raises(ShardError, match="the shards changed since another process opened them"):
        pickle.loads(pickle.dumps(opened))


def test_duplicate_image_names_are_a_counted_error(tmp_path: Path) -> None:
    names = [f"{i}.jpg" for i in range(9)]
    folder = write(tmp_path / "in", *names, "lion.jpg", "lion.png", "pineapple.jpg", "pineapple.JPG")
    told = r"2 samples have two files of one kind, such as lion\.jpg and lion\.png\. Rename one"
    with pytest.raises(ShardError, match=told):
        sp.open_dataset(folder)
    with pytest.raises(ValueError, match=told):
        sp.convert(folder, tmp_path / "out")
    for command in ("info", "check"):
        found = CliRunner().invoke(app, [command, str(folder)])
        assert found.exit_code and "2 samples have two files of one kind" in " ".join(found.output.split())
    report = sp.convert(folder, tmp_path / "out", key_end="first", check_images=False)
    assert sorted(reject.file for reject in report.rejected) == ["pineapple.JPG", "pineapple.jpg"]
    samples = sp.open_dataset(folder, key_end="first")
    assert len(samples) == 10 and list(samples["lion"]) == ["jpg", "png"]
    assert "2 files left out" in samples.dataset.store.rejects_warning()
    checked = CliRunner().invoke(app, ["check", "--key-end", "first", str(folder)])
    assert checked.output.count("two parts with one extension") == 2


@pytest.mark.parametrize("masks", [5, 9])
def test_images_with_masks_in_half_of_the_samples_are_parts_of_one(tmp_path: Path, masks: int) -> None:
    folder = write(tmp_path, *(f"{i}.jpg" for i in range(9)), *(f"{i}.png" for i in range(masks)), "0.seg.png")
    assert len(sp.open_dataset(folder)) == 9


def test_last_dot_keys_are_file_names_and_differences_to_tars_warn(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", "v1.0/dromedary.v1.final.txt", "v1.0/camel.txt")
    assert [sample.key for sample in sp.open_dataset(folder, key_end="last")] == [
        "v1.0/camel",
        "v1.0/dromedary.v1.final",
    ]
    report = sp.convert(folder, tmp_path / "out", key_end="last")
    told = "1 key had dots, which become _ in tars: v1.0/dromedary.v1.final is v1.0/dromedary_v1_final there"
    assert told in report.warnings
    assert [sample.key for sample in sp.open_dataset(tmp_path / "out")] == ["v1.0/camel", "v1.0/dromedary_v1_final"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.jpg", "b.jpg", "labels.csv", "more.csv"], r"several kinds of files, csv \(2 files, such as labels.csv\)"),
        (["a.txt", "b.txt", "data.zip"], r"\.zip is not read here \(data\.zip\): unpack it"),
        ([f"img.{i:04d}.txt" for i in range(30)], 'a key ends at the first dot .* Pass key_end="last"'),
    ],
)
def test_ambiguous_folder_is_an_error_with_a_fix(tmp_path: Path, names: list[str], told: str) -> None:
    with pytest.raises(ShardError, match=told):
        sp.open_dataset(write(tmp_path, *names))


def test_json_list_next_to_photos_is_a_table_and_an_object_is_a_part(tmp_path: Path) -> None:
    folder = write(tmp_path, "a.jpg", "a.json", "b.jpg", "b.json")
    assert [list(sample) for sample in sp.open_dataset(folder)] == [["jpg", "json"]] * 2
    (folder / "all.json").write_text('[{"n": 1}]')
    with pytest.raises(ShardError, match=r"several kinds of files, .*json \(1 file, such as all\.json\)"):
        sp.open_dataset(folder)


def test_an_unknown_setting_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path, "a.txt")
    with pytest.raises(ValueError, match="key= does not apply to"):
        sp.open_dataset(folder, key="n")
    with pytest.raises(ValueError, match="key_end must be 'first' or 'last'"):
        sp.read(folder, key_end="middle").take(1)  # type: ignore[arg-type]

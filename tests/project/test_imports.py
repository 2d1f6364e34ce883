"""What importing the library costs: nothing heavy is imported before something needs it, in any of its processes."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

import savable_pipeline
import task_encoders
from savable_pipeline import custom, energon
from savable_pipeline.data.stores.formats import FORMATS, format_named
from savable_pipeline.tools import convert
from tests.support.toy_files import write_captioned_images
from tests.support.toy_server import s3_settings, serving
from tests.support.toy_stores import WRITERS

# A trainer, whose worker sends the modules that it has imported. `sp.StatefulDataset` is torch's, and looked at where
# the encoders are: tests/task_encoders/test_public_names.py.
PROGRAM = """
import sys

import savable_pipeline as sp

HEAVY = {"torchvision", "torch._dynamo", "transformers", "pyarrow", "yaml", "rich", "typer", "jinja2"}
STORES = {f"savable_pipeline.data.stores.{name}" for name in (
    "arrow_store", "cached_blocks", "cached_samples", "remote_indexing",
)} | {"savable_pipeline.data.remote.session"}


def tell(step, imported, unwanted):
    found = unwanted & set(imported)
    if found:
        print(f"{step}: {sorted(found)}")


class Modules(sp.TaskEncoder):
    global_rng = False  # else torch is imported to be seeded

    def encode(self, sample, rng):
        return sample["json"]

    def batch(self, items, rng):
        return list(sys.modules)


if __name__ == "__main__":
    for name in ("TarShardReader", "SavableLoader", "open_dataset", "read"):
        getattr(sp, name)
        tell(name, sys.modules, HEAVY | STORES | {"torch", "PIL"})
    for name in sp.__all__:
        if name != "StatefulDataset":
            getattr(sp, name)
            tell(name, sys.modules, HEAVY | {"torch", "PIL"})
    pipeline = sp.read(sys.argv[1]).shuffle(8).encode(Modules()).batch(4)
    loader = sp.SavableLoader(pipeline, seed=0, lanes=2, workers=sp.Workers(1, prefetch=1, start_method="spawn"))
    batch = next(iter(loader))
    loader.close()
    tell("worker", batch, HEAVY | STORES | {"torch", "PIL", "savable_pipeline.run.loader", "savable_pipeline.tools"})
    assert "savable_pipeline.data.stores.jsonl" in batch
    tell("trainer", sys.modules, HEAVY | {"torch", "PIL"})
    import savable_pipeline.custom

    tell("custom", sys.modules, HEAVY | {"torch", "PIL"})
    print("done")
"""

# Notes each unwanted import of a process and of all below it, and the functions that child processes are started for.
WATCH = """
import os, sys

watched = {"torch", "torchvision", "transformers", "numpy", "yaml", "rich", "typer", "PIL", "webdataset"}
child = next((word for word in sys.orig_argv if word.startswith("savable_pipeline.")), "command")


def note(word):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"{child} {word}\\n")


note("begins")
sys.addaudithook(lambda event, told: note(told[0]) if event == "import" and told[0] in watched else None)
"""

COMMANDS = """
import os, sys
from savable_pipeline.tools.cli.main import app

for line in sys.stdin.read().splitlines():
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(f"> {line}\\n")
    if line.startswith("convert"):
        from savable_pipeline.tools.convert import ranges

        ranges.LEAST_BYTES = 1  # so that there are several
    code = app(line.split(), standalone_mode=False)
    assert not code, (line, code)
"""


def test_one_line_of_a_stub_makes_a_name_public() -> None:
    for module in (savable_pipeline, custom, energon, convert, task_encoders):
        assert module.__file__ is not None
        stub = Path(module.__file__).with_suffix(".pyi").read_text()
        listed = re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)
        assert len(listed) == len(module.__all__) == stub.count(" import ")
        for place, name in listed:
            assert getattr(module, name) is getattr(importlib.import_module(place), name)
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            _ = module.Nothing


def test_every_format_has_a_unique_stable_name() -> None:
    for form in FORMATS:
        assert format_named(form.name) is form
        copy = pickle.loads(pickle.dumps(form))
        assert (copy.name, copy.suffixes, copy.index_name) == (form.name, form.suffixes, form.index_name)
    assert len({form.index_name for form in FORMATS}) == len(FORMATS)


def test_imports_and_a_run_with_a_worker_load_no_unused_module(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/0.jsonl").write_text('{"id": 1}\n' * 40)
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "lines")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"


def test_commands_on_datasets_and_their_child_processes_import_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    for kind, write in WRITERS.items():
        (tmp_path / kind).mkdir()
        write(tmp_path / kind, [10, 10])
    write_captioned_images(tmp_path / "photos", 8)
    tars, page = tmp_path / "tars", tmp_path / "page.html"
    lines = [
        "--help",
        f"convert {tmp_path}/photos {tars} --workers 2 --shard-samples 4",
        f"info {tars}",
        f"check {tars} --workers 1",
        f"preview {tars} -o {page}",
        f"index {tmp_path}/tokens",
        *(f"info {tmp_path}/{kind}" for kind in WRITERS if kind != "tokens"),  # which indexes it too
        *(f"preview {tmp_path}/{kind} -o {page}" for kind in ("jsonl", "parquet", "mds")),
        f"check {tmp_path}/parquet --workers 1",
        "info s3://jsonl/",
        "info s3://tars/",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        "NOTES": str(tmp_path / "notes"),
        "SAVABLE_CACHE": str(tmp_path / "cache"),
    }
    with serving(tmp_path) as server:
        environment |= s3_settings(server)
        command, told = [sys.executable, "-c", COMMANDS], "\n".join(lines)
        subprocess.run(command, env=environment, input=told, capture_output=True, text=True, check=True)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert not [note for note in notes if note.split()[1] in ("torch", "torchvision", "transformers", "webdataset")]
    assert notes.index("command numpy") > notes.index(f"> {lines[1]}")  # not for the help
    children = {tuple(note.split()) for note in notes if note.startswith("savable_pipeline.")}
    assert not {child for child, word in children if word in ("yaml", "rich", "typer")}
    by_child = {child: {word for name, word in children if name == child} for child, _ in children}
    assert "PIL" not in by_child["savable_pipeline.data.remote.download_process:serve"]
    assert "PIL" in by_child["savable_pipeline.data.shards.index_making:serve_files"]  # that check
    assert "PIL" in by_child["savable_pipeline.tools.convert.jobs:serve_ranges"]

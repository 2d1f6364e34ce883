"""Damage of any kind, in a file of every store: named, counted under skip, and a line of every command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.tools.cli.main import app
from tests.data.stores.test_token_store import write_bin
from tests.support.toy_stores import WRITERS

SAMPLES = 16  # of each of two files


def write_tokens(folder: Path, sizes: list[int]) -> None:
    """Files of documents of 7 tokens."""
    folder.mkdir()
    for shard, size in enumerate(sizes):
        write_bin(folder / f"{shard:04d}.bin", [[shard, *range(n, n + 6)] for n in range(size)])


def write_arrays(folder: Path, sizes: list[int]) -> None:
    """Files of rows of 7 tokens."""
    folder.mkdir()
    for shard, size in enumerate(sizes):
        np.save(folder / f"{shard:04d}.npy", np.full((size, 7), shard, np.uint16))


STORES: dict[str, tuple[Callable[[Path, list[int]], None], Any, str]] = {
    "parquet": (WRITERS["parquet"], custom.ParquetReader, "0000.parquet"),
    "stream": (WRITERS["arrow"], custom.ArrowReader, "0000.arrow"),
    "arrow file": (WRITERS["arrow"], custom.ArrowReader, "0001.arrow"),
    "jsonl": (WRITERS["jsonl"], custom.JsonlReader, "0000.jsonl"),
    "bin": (write_tokens, custom.TokenReader, "0000.bin"),
    "idx": (write_tokens, custom.TokenReader, "0000.idx"),
    "npy": (write_arrays, custom.TokenReader, "0000.npy"),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda raw: raw[: len(raw) * 3 // 5 + 1],
    "cut at its end": lambda raw: raw[:-5],
    "empty": lambda raw: b"",
    "zeros": lambda raw: raw[: len(raw) // 2] + bytes(64) + raw[len(raw) // 2 + 64 :],
    "another head": lambda raw: b"\xff" * 48 + raw[48:],
    "another tail": lambda raw: raw[:-48] + b"\xff" * 48,
    "more": lambda raw: raw + b"\xff\x7f{" * 9,
}


class Everything(sp.TaskEncoder):
    """An item is the shard of a sample whose parts were all read."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> str:
        assert sample.key
        if not all(sample[part] is not None for part in sample) or ("json" in sample and not sample.json()):
            return ""
        return sample.shard


def read(reader: Any, folder: Path, on_error: str) -> tuple[list[str], dict[str, int]]:
    """The shard of each sample, and what was counted."""
    samples = reader(folder, sp.Lane(), shuffle=False, epochs=1, on_error=on_error)
    items = sp.Encode(samples, Everything(), on_error=on_error, max_errors=1.0)  # type: ignore[arg-type]
    return list(items), dict(samples.counts + items.counts)


@pytest.mark.parametrize("indexed", [False, True], ids=["new", "indexed"])
@pytest.mark.parametrize("kind", STORES)
def test_error_of_a_damaged_file_names_it_and_skip_loses_nothing_else(tmp_path: Path, kind: str, indexed: bool) -> None:
    write, reader, name = STORES[kind]
    shard = name.replace(".idx", ".bin")
    for damage, damaged in DAMAGES.items():
        folder = tmp_path / damage
        write(folder, [SAMPLES, SAMPLES])
        if indexed:
            assert len(read(reader, folder, "raise")[0]) == 2 * SAMPLES
        (folder / name).write_bytes(damaged((folder / name).read_bytes()))
        try:
            whole = len(read(reader, folder, "raise")[0]) == 2 * SAMPLES
        except (sp.ShardError, sp.EncodeError) as error:
            assert shard in str(error), damage
            whole = False
        given, counted = read(reader, folder, "skip")
        assert sum(each != shard for each in given) == SAMPLES, damage
        legal = damage == "empty" and kind == "jsonl"  # a file of no lines
        assert whole or legal or any(reason.startswith("skipped/") for reason in counted), damage


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "idx"])
def test_folder_that_replaced_an_indexed_file_is_reported(tmp_path: Path, kind: str) -> None:
    write, reader, name = STORES[kind]
    write(tmp_path / "data", [3, 3])
    read(reader, tmp_path / "data", "raise")
    path = (tmp_path / "data" / name).with_suffix(Path(name).suffix.replace(".idx", ".bin"))
    path.unlink()
    path.mkdir()
    for command, code in (("check", 1), ("info", 2)):
        result = CliRunner().invoke(app, [command, str(tmp_path / "data")], catch_exceptions=False)
        assert result.exit_code == code and path.name in result.output, result.output
    given, counted = read(reader, tmp_path / "data", "skip")
    assert len(given) == 3 and any(reason.startswith("skipped/") for reason in counted)


@pytest.mark.parametrize("kind", ["parquet", "stream", "idx"])
def test_every_command_reports_damage_in_one_line(tmp_path: Path, kind: str) -> None:
    write, _, name = STORES[kind]
    write(tmp_path / "data", [3, 3])
    path = tmp_path / "data" / name
    path.write_bytes(DAMAGES["cut at its end"](path.read_bytes()))
    for command in ("check", "info", "index", "preview"):
        more = ["-o", str(tmp_path / "page.html")] if command == "preview" else []
        result = CliRunner().invoke(app, [command, str(tmp_path / "data"), *more], catch_exceptions=False)
        told = (tmp_path / "page.html").read_text() if more else result.output
        assert result.exit_code == (0 if more else 2 if command == "info" else 1), result.output
        assert name.replace(".idx", ".bin") in told

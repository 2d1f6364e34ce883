"""The command `savable`: what it prints where, and how it exits."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import savable_pipeline as sp
from savable_pipeline.tools.cli.main import app
from savable_pipeline.tools.convert import run_conversion
from tests.conftest import MakeShards
from tests.support.toy_files import SMALL, file_hashes, tar_files, write_captioned_images, write_lines
from tests.support.toy_pipelines import toy_pipeline

TOOL = Path(__file__).parents[3] / "tools/convert.py"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_version_is_that_of_the_package() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"savable_pipeline {sp.__version__}\n")


def test_python_m_runs_every_command() -> None:
    module = [sys.executable, "-m", "savable_pipeline.tools.cli.main"]
    shown = subprocess.run([*module, "ledger", "report", "x", "-o", "gone/a.html"], capture_output=True, text=True)
    assert shown.returncode == 2 and "there is no folder gone" in shown.stderr, shown.stderr


def test_clean_conversion_exits_with_zero_and_reports_its_output(tmp_path: Path) -> None:
    result = run("convert", write_captioned_images(tmp_path / "in", 7), tmp_path / "out", "--shard-samples", "3")
    assert result.exit_code == 0
    assert result.stdout == "7 samples in 3 shards, 30.7 kB\nnothing rejected\n"
    assert len(tar_files(tmp_path / "out")) == 14


def test_rejects_are_reported_with_reasons_and_exit_with_one(tmp_path: Path) -> None:
    bad = {f"bad{i:02d}.jpg": b"x" for i in range(11)} | {"no[red]dot": b"x", ".hidden": b""}
    result = run("convert", write_captioned_images(tmp_path / "in", 2, **bad), tmp_path / "out")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[:6] == [
        "2 samples in 1 shard, 10.2 kB",
        "1 hidden file or folder skipped",
        "12 rejected:",
        "       11 × unreadable image",
        "        1 × no extension",
        "  no[red]dot: no extension",
    ]
    assert lines[6] == "  bad00.jpg: unreadable image (not JPEG, PNG, WebP, GIF, BMP, TIFF or PPM)"
    assert lines[-3:] == [
        "  … 2 more",
        f"all of them: {tmp_path / 'out/.nv-meta/savable.rejected.jsonl'}",
        "FAILED: 12 rejected; --skip-bad accepts this",
    ]
    assert len(tar_files(tmp_path / "out")) == 4


def test_with_skip_bad_rejects_are_reported_and_exit_with_zero(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2, notes=b"x")
    result = run("convert", source, tmp_path / "out", "--skip-bad")
    assert result.exit_code == 0 and "1 × no extension" in result.stdout and "FAILED" not in result.stdout
    assert run("convert", source, tmp_path / "out").exit_code == 1, "told again, though all is done"


def test_if_everything_is_rejected_the_exit_code_is_two(tmp_path: Path) -> None:
    result = run("convert", write_captioned_images(tmp_path / "in", 0, notes=b"x"), tmp_path / "out", "--skip-bad")
    assert result.exit_code == 2
    assert "1 × no extension" in result.stdout and "everything" in result.stderr


def test_the_options_reach_the_conversion(tmp_path: Path) -> None:
    write_captioned_images(tmp_path / "pictures", 4, **{"x.jpg": b"unchecked"})
    source = write_lines(tmp_path / "meta.jsonl", {"id": "k", "a": "x.jpg", "b": "../pictures/000.jpg"})
    options = ["--key-field=id", "--file-field=a", "--file-field=b=mask", "--allow-outside", "--no-check-images"]
    result = run("convert", source, tmp_path / "out", *options, "--files-from", tmp_path / "pictures")
    assert result.exit_code == 0, result.output
    assert list(tar_files(tmp_path / "out")) == ["k.jpg", "k.json", "k.mask.jpg"]
    result = run("convert", write_lines(tmp_path / "b.jsonl", {"image": "a cat"}), tmp_path / "b", "--no-files")
    assert result.exit_code == 0 and list(tar_files(tmp_path / "b")) == ["000000001.json"]
    result = run("convert", tmp_path / "pictures", tmp_path / "c", "--shard-bytes=0.001kB", "--workers=1")
    assert len(list((tmp_path / "c").glob("*.tar"))) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "gone", "out"], "gone: no such file or folder"),
        (["convert", "in", "out", "--shard-bytes=-1"], "must be at least 1"),
        (["convert", "in", "out", "--shard-bytes", "1 G"], "no size: '1 G'. Pass bytes, or a number with B, kB, MB"),
        (["convert", "in", "out", "--workers=0"], "workers must be 1 or more"),
        (["convert", "in", "out", "--no-files", "--file-field=a"], "exclude each other"),
        (["convert", "in", "file"], "file is a file"),
        (["convert", "in", "file/out"], "Not a directory"),
        (["convert", "in", "out", "--keys", "file"], "file: no key in it; expected the keys of samples, one a line"),
        (["convert", "in", "out", "--only", " , "], "--only names no part. Pass extensions, such as jpg,txt"),
        (["preview", "in", "-o", "gone/page.html"], "gone/page.html: there is no folder gone. Create it"),
        (["preview", "in", "-o", "in"], "in is a folder; expected a name for a file, such as in/page.html"),
        (["ledger", "report", "in", "-o", "gone/page.html"], "there is no folder gone. Create it"),
        (
            ["ledger", "batch", "in", "no:such", "--slot=0", "--save=gone/a.pt"],
            "there is no folder gone. Create it",
        ),
        (["verify-resume", "no:such", "--pictures=gone"], "there is no folder gone for images"),
        (["info", "gone"], "gone: no such file or folder"),
        (["info", "empty"], "/empty: no .tar file in this folder or below it"),
        (["check", "empty"], "`savable convert SRC DST` writes shards"),
        (["info", "table.csv"], "/table.csv: no row below the column names"),
        (["preview", "in/000.jpg"], "000.jpg: raw files are read as one folder. Name it"),
        (
            ["state", "gone"],
            "gone: no such file. Pass a file with the state of a loader, of torch.save or to_json",
        ),
        (["state", "in"], "in: a folder. Pass a file with the state of a loader, of torch.save or to_json"),
        (["info", "bad.tar"], "bad.tar"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_exit_code_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_captioned_images(tmp_path / "in", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "table.csv").write_text("path,text\n")
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 300)
    result = run(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ") and len(result.stderr.splitlines()) <= 2


def test_another_conversion_into_the_same_folder_exits_with_two(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2)
    run("convert", source, tmp_path / "out")
    result = run("convert", source, tmp_path / "out", "--shard-samples=1")
    assert result.exit_code == 2
    assert "shard_samples: None there, 1 here" in result.stderr


def test_repeated_conversion_reports_that_it_is_complete(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 2)
    first, second = (run("convert", source, tmp_path / "out").stdout for _ in range(2))
    assert second == f"all is there already, nothing was written:\n{first}"
    (tmp_path / "out/000000.tar").unlink()
    assert run("convert", source, tmp_path / "out").stdout == first


def test_repeated_conversion_of_compressed_tars_reports_that_it_is_complete(tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    with tarfile.open(tmp_path / "packed/a.tar.gz", "w:gz") as tar:
        tar.add(write_captioned_images(tmp_path / "in", 2) / "000.txt", "000.txt")
    os.utime(tmp_path / "packed/a.tar.gz", (0, 0))
    first = run("convert", tmp_path / "packed", tmp_path / "out").stdout
    assert run("convert", tmp_path / "packed", tmp_path / "out").stdout.splitlines() == [
        "all is there already, nothing was written:",
        *first.splitlines(),
    ]


def test_another_source_into_the_same_folder_is_an_error_with_both_paths(tmp_path: Path) -> None:
    source, other = write_captioned_images(tmp_path / "in", 2), write_captioned_images(tmp_path / "other", 3)
    run("convert", source, tmp_path / "out")
    result = run("convert", other, tmp_path / "out")
    assert result.exit_code == 2
    assert f"source: '{source}' there, '{other}' here samples: 2 there, 3 here" in result.stderr
    same_sizes = write_captioned_images(tmp_path / "same", 2)
    text = (same_sizes / "000.txt").read_bytes()
    (same_sizes / "000.txt").write_bytes(text.upper())
    result = run("convert", same_sizes, tmp_path / "out")
    assert result.exit_code == 2
    assert f"000.txt; source: '{source}' there, '{same_sizes}' here" in result.stderr


def test_ctrl_c_prints_one_word_and_exits_with_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("savable_pipeline.tools.convert.run_conversion", interrupted)
    result = run("convert", write_captioned_images(tmp_path / "in", 1), tmp_path / "out")
    assert result.exit_code == 130 and result.stderr.splitlines()[-1] == "stopped"


def test_a_short_job_shows_no_progress_in_a_pipe_and_a_bar_on_a_terminal(tmp_path: Path) -> None:
    source = write_captioned_images(tmp_path / "in", 3)
    pipe = run("convert", source, tmp_path / "a")
    assert pipe.stderr == f"reading {source}: format folder\n", "the job took less than ten seconds"
    ours, theirs = pty.openpty()
    terminal = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    arguments = [sys.executable, TOOL, source, tmp_path / "b"]
    with subprocess.Popen(arguments, stderr=theirs, stdout=subprocess.PIPE, env=terminal) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            while chunk := os.read(ours, 4096):
                shown += chunk
        assert process.stdout is not None
        assert process.stdout.read().decode() == pipe.stdout
    os.close(ours)
    assert process.returncode == 0
    assert "━" * 20 in shown.decode() and "3/3" in shown.decode() and "converting: 0 of" not in shown.decode()
    assert file_hashes(tmp_path / "a") == file_hashes(tmp_path / "b")


def test_info_summarizes_a_dataset(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 7, **{"b/001.json": b"{}"}), tmp_path / "out", SMALL)
    before = file_hashes(tmp_path / "out")
    shown = run("info", tmp_path / "out").stdout
    assert shown.splitlines()[0] == f"{tmp_path / 'out'}: 7 samples (3 shards, 30.7 kB)"
    for words in ("split train 7 samples", "000002.tar: 1 sample,", "json │ 1", "000: jpg"):
        assert words in " ".join(shown.split()), words
    one = run("info", tmp_path / "in").stdout
    assert one.splitlines()[0].startswith(f"{tmp_path / 'in'}: 7 samples (") and "shard" not in one
    facts = json.loads(run("info", "--json", tmp_path / "out").stdout)
    assert facts["parts"]["txt"] == {"samples": 7, "mean_bytes": pytest.approx(18 + (2 * 2 + 2 * 6) / 7)}
    assert facts["parts"]["json"] == {"samples": 1, "mean_bytes": 2}
    assert facts["first_sample"] == {"key": "000", "parts": {"jpg": facts["first_sample"]["parts"]["jpg"], "txt": 18}}
    assert (facts["shards"], facts["samples"], facts["bytes"]) == (3, 7, 3 * 10_240 + 0)
    assert facts["splits"] == {"train": 7}
    assert file_hashes(tmp_path / "out") == before


def test_info_of_some_shards_counts_those_only(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 7), tmp_path / "out", SMALL)
    facts = json.loads(run("info", "--json", f"{tmp_path}/out/00000{{1..2}}.tar").stdout)
    assert (facts["shards"], facts["samples"], facts["parts"]["jpg"]["samples"]) == (2, 4, 4)


def test_info_shows_splits_and_exclusions(tmp_path: Path) -> None:
    run_conversion(write_captioned_images(tmp_path / "in", 7), tmp_path / "out", SMALL)
    splits = {"split_parts": {"train": ["00000{0..1}.tar"], "val": ["000002.tar"]}, "exclude": ["000000.tar"]}
    (tmp_path / "out/.nv-meta/split.yaml").write_text(json.dumps(splits))
    assert json.loads(run("info", "--json", tmp_path / "out").stdout)["splits"] == {"train": 3, "val": 1}
    (tmp_path / "out/.nv-meta/split.yaml").write_text("- what: is this")
    result = run("info", tmp_path / "out")
    assert result.exit_code == 2 and "expected a mapping, found list" in result.stderr


def test_info_check_and_preview_accept_settings_of_stores(tmp_path: Path) -> None:
    photos, page = tmp_path / "photos", tmp_path / "page.html"
    write_captioned_images(photos, 0, **{f"a/img.v1.{i:04d}.txt": b"x" for i in range(30)})
    for command in (["info"], ["check", "--workers=1"], ["preview", "-o", str(page)]):
        stopped = run(*command, photos)
        said = " ".join(stopped.output.split())
        assert stopped.exit_code == (1 if command[0] == "check" else 2) and "--key-end last" in said
        told = run(*command, photos, "--key-end", "last", "--classes")
        assert told.exit_code == 0, told.output
        assert "30 samples" in told.stdout or command[0] == "preview"
    assert "img.v1.0000" in page.read_text()
    assert json.loads(run("info", "--json", photos, "--key-end=last", "--classes").stdout)["parts"].keys() == {
        "cls",
        "txt",
    }
    lines = write_lines(tmp_path / "a.jsonl", *({"id": f"k{i}", "picture": f"{i:03d}.jpg"} for i in (0, 3)))
    write_captioned_images(tmp_path / "elsewhere", 4)
    named = ["--files-from", str(tmp_path / "elsewhere"), "--file-field", "picture", "--key-field", "id"]
    first = json.loads(run("info", "--json", lines, *named).stdout)["first_sample"]
    assert (first["key"], first["parts"].keys()) == ("k0", {"jpg", "json"})
    (tmp_path / "elsewhere/003.jpg").write_bytes(b"no image")
    checked = run("check", lines, *named, "--workers=1")
    assert checked.exit_code == 1 and "k3.jpg" in checked.stdout and "unreadable image" in checked.stdout
    for command in ("info", "check", "preview"):
        assert (
            "key_end= does not apply to jsonl files, only to folder" in run(command, lines, "--key-end", "last").stderr
        )
    assert "key_end must be 'first' or 'last', not 'middle'" in run("info", photos, "--key-end", "middle").stderr


def test_check_groups_errors_of_many_samples_in_one_line(tmp_path: Path) -> None:
    photos = write_captioned_images(
        tmp_path / "photos", 0, **{f"{i:03d}.jpg": b"no image" for i in range(120)}, **{"x.json": b"{"}
    )
    said = run("check", photos, "--workers=1").stdout
    lines = [line for line in said.splitlines() if not line.startswith("warning")]
    assert lines[1:3] == ["      120 × unreadable image", "        1 × malformed JSON"]
    (fault,) = [line for line in lines[3:] if "unreadable" in line]
    first, others = fault.split(" (120 times; also ")
    assert first.startswith("000.jpg: ") and first.endswith(
        "unreadable image: not JPEG, PNG, WebP, GIF, BMP, TIFF or PPM"
    )
    assert [name in others for name in ("001.jpg", "002.jpg", "003.jpg", "004.jpg")] == [True, True, True, False]
    assert others.endswith(" and 116 more)") and len(lines) == 6 and "malformed JSON" in lines[4]
    assert lines[0].startswith("121 problems found in 121 samples (") and lines[5] == "FAILED: 121 problems"


def test_info_shows_the_fields_of_json_lines(tmp_path: Path) -> None:
    rows = [{"id": i, "caption": f"no. {i}"} if i % 3 else {"id": i, "none": None} for i in range(30)]
    found = json.loads(run("info", "--json", write_lines(tmp_path / "a.jsonl", *rows)).stdout)
    assert {part: each["samples"] for part, each in found["parts"].items()} == {"json": 30, "id": 30, "caption": 20}
    assert found["parts"]["caption"]["mean_bytes"] == pytest.approx((6 * 5 + 14 * 6) / 20)
    assert "│ caption │ 20 " in run("info", tmp_path / "a.jsonl").stdout


def test_the_lanes_of_a_state_are_read_on_a_terminal_of_80_columns(make_shards: MakeShards, tmp_path: Path) -> None:
    pipeline = partial(toy_pipeline, str(make_shards([40])), blend="nested", buffer=4)
    with sp.SavableLoader(pipeline, seed=3, lanes=2) as loader:
        next(iter(loader))
        torch.save(loader.state_dict(), tmp_path / "state.pt")
    shown = CliRunner().invoke(app, ["state", str(tmp_path / "state.pt")], env={"COLUMNS": "80"}).output
    assert max(map(len, shown.splitlines())) == 80
    lanes = shown.partition("the lanes")[2]
    assert "…" not in lanes
    for words in (
        "x/a/TarShardReader │ epoch",
        "│ x/ShuffleBuffer    │ refs 4, draws 16",
        "│ 0    │                    │ 1 batch, ",
    ):
        assert words in lanes, lanes


def test_check_names_position_and_reason_in_a_table_once(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("image,text\nno.jpg,a cat\n")
    lines = run("check", tmp_path / "bad.csv", "--file-field", "image", "--workers=1").stdout.splitlines()
    assert lines[0].startswith("1 problem found in 1 sample (") and lines[-1] == "FAILED: 1 problem"
    (line,) = lines[1:-1]
    assert line.count("missing file") == line.count("bad.csv") == 1, line

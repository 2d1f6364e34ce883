"""A command that imports a user's file looks at what it defines, and trains nothing."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import savable_pipeline as sp
from savable_pipeline.core.named_object import imported, named_object
from savable_pipeline.tools.cli.main import app

_FILE = """
from pathlib import Path
import savable_pipeline as sp

def pipeline(lane):
    return sp.Batcher(sp.TarShardReader({shards!r}, lane), size=2)

loader = sp.SavableLoader(pipeline, seed=7, lanes=2)
def train():
    {how}
        Path({checkpoint!r}).write_text("overwritten")
{called}
"""
HOW = {
    "for": "for batch in loader:",
    "next": "if next(loader):",
    "skip": "if loader.skip(2) is None:",
    "iter": "if iter(loader):",
}


@pytest.fixture(autouse=True)
def search_path() -> Iterator[None]:
    """What is named is searched for in its own folder first; processes that tests start later must not."""
    before = [*sys.path]
    yield
    sys.path[:] = before


def write(tmp_path: Path, shards: Path, name: str, how: str, called: str) -> Path:
    file = tmp_path / f"{name}.py"
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("whole")
    file.write_text(_FILE.format(shards=str(shards), how=HOW[how], checkpoint=str(checkpoint), called=called))
    return file


@pytest.mark.parametrize("how", HOW)
def test_file_that_trains_on_import_is_an_error_that_shows_the_guard(
    tmp_path: Path, make_shards: object, how: str
) -> None:
    file = write(tmp_path, make_shards([9, 9]), f"unguarded_{how}", how, "train()")  # type: ignore[operator]
    with pytest.raises(sp.SavableError, match='Move that below if __name__ == "__main__":'):
        named_object(f"{file}:pipeline")
    assert (tmp_path / "checkpoint").read_text() == "whole"


@pytest.mark.parametrize("command", ["preview", "verify-resume", "plan"])
def test_no_command_starts_a_training(
    tmp_path: Path, make_shards: object, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"trains_{command.replace('-', '_')}"
    file = write(tmp_path, make_shards([9, 9]), name, "for", "train()")  # type: ignore[operator]
    with pytest.raises(SystemExit) as ended:
        app([command, f"{file}:pipeline"])
    assert ended.value.code == 2
    assert 'if __name__ == "__main__":' in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "checkpoint").read_text() == "whole"


def test_a_guarded_file_is_imported_and_its_loader_can_be_used_afterwards(tmp_path: Path, make_shards: object) -> None:
    called = 'if __name__ == "__main__":\n    train()'
    file = write(tmp_path, make_shards([9, 9]), "guarded", "next", called)  # type: ignore[operator]
    loader = named_object(f"{file}:loader")
    assert len(next(loader)) == 2
    with pytest.raises(ValueError, match="no 'gone'"):
        named_object(f"{file}:gone")
    assert len(next(loader)) == 2


def test_a_module_that_another_thread_still_imports_counts_as_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "begun_and_go_on", (begun, go_on), raising=False)
    (tmp_path / "slowly_made.py").write_text(
        "import threading\nbegun, go_on = threading.begun_and_go_on\nbegun.set()\nassert go_on.wait(30)\nTensor = 3\n"
    )
    assert imported("slowly_made") is None
    other = threading.Thread(target=importlib.import_module, args=("slowly_made",))
    other.start()
    assert begun.wait(30) and "slowly_made" in sys.modules
    assert imported("slowly_made") is None
    go_on.set()
    other.join()
    assert imported("slowly_made").Tensor == 3
    del sys.modules["slowly_made"]

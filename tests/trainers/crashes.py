"""Kills a trainer's saves at each change of a file, resumes, and says what came back.

    a run of 12 batches, a checkpoint every 4 ── killed before its n-th change of a file of a checkpoint ──▶ resumed
                                              ├─ and the file that was written last cut in half ───────────▶ resumed
                                              └─ and all files emptied that were not synced ───────────────▶ resumed

    python -m tests.trainers.crashes hf /tmp/folder 1

A change is an opening for writing, a rename, a removal, a folder, an fsync, or a step of torch's writer or that of
safetensors. Cut and emptied files stand for a loss of power, which may lose bytes that were not synced. A resumed run
repeats what the run that never stopped saw from one of its checkpoints on, each batch and each loss, or it ends with an
error: "right" and "refused". Anything else is "apart": the model is of one checkpoint and the data are of another.

The arguments are the trainer, a folder, and a stride: it tries every n-th change, from a random one on.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

from tests.support.toy_training import read_log, write_training_shards
from tests.trainers.drive import Case, child, ended, preload, run

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SAVE_EVERY = 4


def kill_before(change: int, below: Path, changes: Path) -> None:
    """Kill this process before its `change`-th change of a file below a folder, and list the changes in a file.

    Files that are not synced at that moment are listed in another one.
    """
    done, unsynced = 0, set[str]()
    tempfile.tempdir = str(below / "temporary")  # where Lightning writes a checkpoint before it renames it
    Path(tempfile.tempdir).mkdir(exist_ok=True)
    listing = os.open(changes, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def changed(name: str, *paths: Any) -> None:
        nonlocal done
        named = [
            str(Path(os.fsdecode(path)).absolute()) for path in paths if isinstance(path, str | bytes | os.PathLike)
        ]
        if any(path.startswith(f"{below}{os.sep}") and not path.endswith(".jsonl") for path in named):
            done += 1
            if done == change:
                names = [os.path.relpath(path, below) for path in unsynced]
                Path(f"{changes}.unsynced").write_text("\n".join(names))
                os.kill(os.getpid(), signal.SIGKILL)
            if name in ("os.remove", "synced"):
                unsynced.discard(named[0])
            elif name == "os.rename":
                old, new = named
                moved = {path for path in unsynced if path == old or path.startswith(f"{old}{os.sep}")}
                unsynced.difference_update({new, *moved})
                unsynced.update(new + path[len(old) :] for path in moved)
            elif name in ("open", "torch opens", "safetensors"):
                unsynced.add(named[0])
            os.write(listing, f"{name} {' '.join(map(os.path.basename, named))}\n".encode())

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name in _CHANGES:
            changed(name, *arguments[:2])  # of a rename both names: one may be in another folder
        elif name == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
            changed(name, arguments[0])

    sys.addaudithook(hook)
    _watch_writers(changed)


def _watch_writers(changed: Callable[..., None]) -> None:
    """Watch writers in C++ and Rust, and fsync, which raise no audit event."""
    from torch.serialization import _open_zipfile_writer_file as Writer

    def watched(call: Any, path_of: Callable[..., Any], *names: str) -> Any:
        @wraps(call)
        def watching(*args: Any, **kwargs: Any) -> Any:
            path = path_of(*args)
            changed(names[0], path)
            found = call(*args, **kwargs)
            changed(names[1], path)
            return found

        return watching

    Writer.__init__ = watched(Writer.__init__, lambda self, name: name, "torch opens", "torch has opened")
    Writer.__exit__ = watched(Writer.__exit__, lambda self, *_: self.name, "torch ends", "torch has ended")
    os.fsync = watched(os.fsync, lambda fd: Path(f"/proc/self/fd/{fd}").readlink(), "fsync", "synced")
    with suppress(ImportError):
        import safetensors.torch as st

        st.serialize_file = watched(st.serialize_file, lambda _, name, *__: name, "safetensors", "has written")


def cut_last(folder: Path) -> str:
    """Cut the file that was written last in half. Return "" if there is none."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    if not files:
        return ""
    last = max(files, key=lambda path: path.stat().st_mtime_ns)
    os.truncate(last, last.stat().st_size // 2)
    return f"{last.name} cut"


def empty_unsynced(folder: Path, changes: Path) -> str:
    """Empty the files that were not synced when the run was killed. Return "" if there are none."""
    names = Path(f"{changes}.unsynced").read_text().splitlines()
    files = [path for path in (folder / name for name in names) if path.is_file()]
    for path in files:
        os.truncate(path, 0)
    return f"{len(files)} files emptied" * bool(files)


@dataclass(frozen=True)
class Trainer:
    """Functions that start a run, and resume it from its folder of checkpoints. Both log batches and losses."""

    train: Callable[[str], None]  # of a run
    resume: Callable[[str], None]
    log_of: Callable[[str], list[Any]]  # "straight", or the name of a run that was resumed
    folder: Path  # that has the folders of runs


def trainer_of_page(trainer: str, folder: Path) -> Trainer:
    """Return the trainer of a page's script."""
    preload(trainer)
    write_training_shards(folder / "shards")
    case = Case(trainer, str(folder), "straight", "straight", workers=0, save_every=SAVE_EVERY)

    def resume(name: str) -> None:
        run(replace(case, run=name, log=name, resume=True))

    def log_of(name: str) -> list[Any]:
        path = replace(case, log=name).log_of(0)
        return read_log(path) if path.exists() else []

    return Trainer(lambda name: run(replace(case, run=name, log=f"{name} killed")), resume, log_of, folder)


def trainer_of_quickstart(folder: Path) -> Trainer:
    """Return the trainer of the quickstart on its digits, with a checkpoint every 10 of 25 steps."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "quickstart"))
    import quickstart

    recipe = quickstart.RECIPES["digits"]
    quickstart.prepare(recipe, folder)

    def train(name: str, *, resumed: bool = False) -> None:
        (folder / name).mkdir(exist_ok=True)
        checkpoint = folder / name / "train.pt"
        log = folder / name / ("resumed.jsonl" if resumed else "train.jsonl")
        if resumed:  # a run that is resumed goes on writing where it did
            log = folder / f"{name}.jsonl"
        quickstart.train(log, recipe, folder, 25, 0, checkpoint if resumed and checkpoint.exists() else None)

    def log_of(name: str) -> list[Any]:
        path = folder / "straight" / "train.jsonl" if name == "straight" else folder / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [tuple(json.loads(line).values())[1:] for line in lines]

    return Trainer(train, partial(train, resumed=True), log_of, folder)


def outcome(trainer: Trainer, name: str, straight: list[Any], starts: range) -> str:
    """Resume a run, and return "right from K", "refused: ERROR" or "apart: …"."""
    log = trainer.folder / f"{name} resumed.txt"

    def resume() -> None:
        with log.open("w") as file, redirect_stderr(file):
            os.dup2(file.fileno(), 2)
            os.dup2(file.fileno(), 1)
            try:
                trainer.resume(name)
            except BaseException as error:
                print(f"REFUSED {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=file)
                raise

    status, found = ended(child(resume)), trainer.log_of(name)
    begun = [start for start in starts if found == straight[start : start + len(found)]] if found else []
    if status == 0:
        right = [start for start in starts if found == straight[start:]]
        return f"right from {right[0]}" if right else f"apart: {len(found)} batches that no checkpoint explains"
    refusals = [line for line in log.read_text().splitlines() if line.startswith("REFUSED ")]
    if found and not begun:
        return f"apart, and then {refusals[-1] if refusals else status}"
    return refusals[-1].lower().replace("refused", "refused:", 1) if refusals else f"apart: ended with {status}"


def try_kills(trainer: Trainer, starts: range, stride: int) -> Iterator[tuple[int, str, str, str]]:
    """Kill at every `stride`-th change. Yield its number, the change, what a power failure lost, and the outcome."""
    folder = trainer.folder

    def killed(name: str, change: int) -> int:
        def work() -> None:
            (folder / name).mkdir()
            kill_before(change, folder / name, folder / f"{name}.changes")
            trainer.train(name)

        return ended(child(work))

    assert killed("straight", 0) == 0
    changes = (folder / "straight.changes").read_text().splitlines()
    assert changes, "no file of a checkpoint was changed"
    straight = trainer.log_of("straight") or trainer.log_of("straight killed")
    for change in range(1 + random.randrange(stride), len(changes) + 1, stride):
        name = f"killed {change}"
        assert killed(name, change) == -signal.SIGKILL, name
        losses: dict[str, Callable[[Path], str]] = {
            "cut": cut_last,
            "emptied": partial(empty_unsynced, changes=folder / f"{name}.changes"),
        }
        for loss in losses:
            shutil.copytree(folder / name, folder / f"{name} {loss}")
        yield change, changes[change - 1], "", outcome(trainer, name, straight, starts)
        for loss, lose in losses.items():
            if lost := lose(folder / f"{name} {loss}"):
                yield change, changes[change - 1], lost, outcome(trainer, f"{name} {loss}", straight, starts)
        for rest in (name, *(f"{name} {loss}" for loss in losses)):
            shutil.rmtree(folder / rest)


def main(name: str, folder: Path, stride: int) -> int:
    """Try a trainer; returns how many outcomes were "apart"."""
    trainer = trainer_of_quickstart(folder) if name == "quickstart" else trainer_of_page(name, folder)
    starts = range(0, 25, 10) if name == "quickstart" else range(0, 12 + 1, SAVE_EVERY)
    counts: Counter[str] = Counter()
    for change, what, lost, found in try_kills(trainer, starts, stride):
        counts[found.split(":")[0].split(" ")[0].rstrip(",")] += 1
        print(f"{name} {change}: before {what}{f', {lost}' * bool(lost)}: {found}", flush=True)
    print(f"{name}: {dict(counts)}", flush=True)
    return counts["apart"]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))

"""The cases of the table trainer × case: runs that are killed and resumed, beside runs that never stopped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_training import LANES, SAMPLES, read_log, write_training_shards
from tests.trainers.drive import Case, make_evaluation, pipeline_for

EPOCH = SAMPLES // 4  # batches
WITHOUT_DROPOUT = {"torch", "fsdp2", "megatron"}  # a batch scores the same on any rank that has the same weights
Log = list[tuple[str, str]]  # the hash and the loss of each batch


class Differs(AssertionError):
    """What is not as in the run that never stopped."""


def drive(cases: list[Case], *tests: str, python: str = sys.executable, ranks: int = 1) -> None:
    """Run cases, and files of tests, in processes of their own.

    Raises `Differs` with the end of their output if one does not end well.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [python, *torchrun, "-m", "tests.trainers.drive", *(case.text for case in cases), *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    killed = ranks > 1 and cases[0].kill_at is not None
    if bool(done.returncode) != killed:
        raise Differs(f"the process ended with {done.returncode}:\n{done.stdout[-9000:]}\n{done.stderr[-3000:]}")


def legs(trainer: str, folder: Path, kill_at: int, **settings: object) -> list[Case]:
    """A run that never stops, one that is killed after `kill_at` batches, and one that goes on from its checkpoint."""
    if not (folder / "shards").exists():
        write_training_shards(folder / "shards")
    straight = Case(trainer, str(folder), "straight", "straight", **settings)  # type: ignore[arg-type]
    killed = replace(straight, run="killed", log="killed", kill_at=kill_at)
    return [straight, killed, replace(killed, log="resumed", kill_at=None, resume=True)]


def logs(cases: list[Case], *, rank: int = 0, train: bool = True) -> list[Log]:
    return [read_log(case.log_of(rank), train=train) for case in cases]


def expect_resumed(straight: Log, killed: Log, resumed: Log, saved_at: int) -> None:
    """Raise `Differs` unless both runs saw what the one that never stopped saw, the last from `saved_at` batches on."""
    if killed != straight[: len(killed)] or len(killed) < saved_at:
        raise Differs(f"the killed run differs at batch {first_difference(killed, straight)}")
    expected = straight[saved_at:]
    if resumed != expected:
        found = first_difference(resumed, expected)
        same = [batch for batch, _ in resumed] == [batch for batch, _ in expected]
        which = "another loss, of the same batches," if same else "another"
        raise Differs(f"resumed at {saved_at}: {len(resumed)} batches for {len(expected)}, {which} at {found}")


def first_difference(found: Log, expected: Log) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(map(len, (found, expected)))
    )


def saved_before(kill_at: int, save_every: int) -> int:
    return kill_at // save_every * save_every


@dataclass(frozen=True)
class Trial:
    """Runs, in their order, each with its number of ranks; and what looks at their logs, and raises `Differs`."""

    runs: list[tuple[int, Case]]
    check: Callable[[], None]

    @property
    def on_one_rank(self) -> bool:
        return all(ranks == 1 for ranks, _ in self.runs)


Plan = Callable[[str, Path], Trial]


def one_rank(trainer: str, folder: Path, **settings: object) -> Trial:
    """Killed at a random batch after the first checkpoint, and resumed, on one rank."""
    kill_at = random.randint(5, 8)
    cases = legs(trainer, folder, kill_at, **settings)
    return Trial([(1, case) for case in cases], lambda: expect_resumed(*logs(cases), saved_before(kill_at, 4)))


def two_ranks(trainer: str, folder: Path) -> Trial:
    """Killed at a random step and resumed on two ranks."""
    cases = legs(trainer, folder, random.randint(5, 7), workers=1)

    def check() -> None:
        for rank in range(2):
            expect_resumed(*logs(cases, rank=rank), 4)
        if logs(cases)[0] == logs(cases, rank=1)[0]:
            raise Differs("both ranks saw the same batches")

    return Trial([(2, case) for case in cases], check)


def dp_by_tp(trainer: str, folder: Path) -> Trial:
    """Four processes, two peers a data-parallel rank: killed and resumed, with equal batches for peers."""
    cases = legs(trainer, folder, random.randint(5, 7), workers=0)

    def check() -> None:
        for rank in range(4):
            expect_resumed(*logs(cases, rank=rank), 4)
        seen = [batches(cases[0], rank) for rank in range(4)]
        if seen[0] != seen[1] or seen[2] != seen[3] or seen[0] == seen[2]:
            raise Differs("peers saw different batches, or data-parallel ranks the same ones")

    return Trial([(4, case) for case in cases], check)


def other_ranks(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Killed on `before` ranks, resumed on `after`: the slots go on where they were, and so do the weights."""
    _, killed, resumed = legs(trainer, folder, 6, workers=1)

    def check() -> None:
        expected = passes(trainer, folder, "endless", 30)
        first = 4 * before
        for rank in range(before):
            check_slots(batches(killed, rank), expected, rank, before, 0)
        for rank in range(after):
            found = batches(resumed, rank)
            check_slots(found, expected, (rank - first) % after, after, first)
            if len(found) < 8:
                raise Differs(f"rank {rank} saw {len(found)} batches after the resume")
        if trainer in WITHOUT_DROPOUT:
            scored = {entry for rank in range(before) for entry in logs([killed], rank=rank)[0][4:5]}
            resumed_with = {logs([resumed], rank=rank)[0][0] for rank in range(after)}
            if len(scored & resumed_with) != min(before, after):
                raise Differs("the first batches after the resume have other losses: the weights are not those saved")

    return Trial([(before, killed), (after, resumed)], check)


def keeps_the_best(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Evaluates with each save and keeps the best and the last: killed behind a rotation, resumed on `after` ranks."""
    kill_at = random.choice([7, 9])
    saved_at = saved_before(kill_at, 2)
    straight, killed, resumed = legs(trainer, folder, kill_at, workers=1, save_every=2, best=True)

    def check() -> None:
        expected = passes(trainer, folder, "endless", 30)
        first = saved_at * before
        for rank in range(before):
            check_slots(batches(killed, rank), expected, rank, before, 0)
        for rank in range(after):
            check_slots(batches(resumed, rank), expected, rank, after, first)
            check_evaluations(resumed, rank, after, (resumed.batches - saved_at) // 2)
            if before == after:
                expect_resumed(*logs([straight, killed, resumed], rank=rank), saved_at)
                scored = logs([straight, resumed], rank=rank, train=False)
                if scored[1] != scored[0][-len(scored[1]) :]:
                    raise Differs(f"rank {rank}: the resumed run's evaluations score otherwise")
        check_best(resumed, saved_at)
        if before == after and weights_of(resumed) != weights_of(straight):
            raise Differs("the run that never stopped kept other checkpoints, or loaded another at its end")

    runs = [(before, straight)] if before == after else []
    return Trial([*runs, (before, killed), (after, resumed)], check)


def check_evaluations(case: Case, rank: int, ranks: int, count: int) -> None:
    slots = [digest({name: part for name, part in batch.items() if name != "valid"}) for batch in make_evaluation(case)]
    if [batch for batch, _ in logs([case], rank=rank, train=False)[0]] != slots[rank::ranks] * count:
        raise Differs(f"rank {rank} of {ranks} evaluated on other batches than those of its slots")


def check_best(case: Case, saved_at: int) -> None:
    """Of all evaluations since the first start, the best one's checkpoint is kept, beside the last, and was loaded."""
    found = weights_of(case)
    last = Path(case.folder, case.run, "run", f"checkpoint-{case.batches}")
    history = json.loads((last / "trainer_state.json").read_text())["log_history"]
    scores = {entry["step"]: entry["eval_loss"] for entry in history if "eval_loss" in entry}
    if [*scores] != [*range(2, case.batches + 1, 2)]:
        raise Differs(f"evaluated after steps {[*scores]}")
    best = (max if case.trainer == "hf" else min)(scores, key=lambda step: scores[step])
    assert best < saved_at, f"{scores}: the resumed run has nothing to remember; take other data"
    if found.keys() != {f"checkpoint-{best}", last.name, "loaded"} or found["loaded"] != found[f"checkpoint-{best}"]:
        raise Differs(f"{scores}: kept {[*found]}, or loaded another than the best")


def weights_of(case: Case) -> dict[str, bytes]:
    """By checkpoint that was kept, and of the model that was loaded at the end."""
    folders = {path.name: path for path in Path(case.folder, case.run, "run").glob("checkpoint-*")}
    folders["loaded"] = case.loaded
    return {name: (folder / "model.safetensors").read_bytes() for name, folder in folders.items()}


def batches(case: Case, rank: int = 0) -> list[str]:
    return [batch for batch, _ in read_log(case.log_of(rank))]


def check_slots(found: list[str], slots: list[str], rank: int, ranks: int, first: int) -> None:
    wanted = slots[first + rank :: ranks][: len(found)]
    if found != wanted:
        raise Differs(f"from slot {first} on, rank {rank} of {ranks} saw other batches than those of its slots")


def passes(trainer: str, folder: Path, kind: str, count: int) -> list[str]:
    """The batches of a loader without a trainer, through the ends of epochs."""
    found: list[str] = []
    with sp.SavableLoader(pipeline_for(trainer, folder, kind), seed=7, lanes=LANES) as loader:
        while len(found) < count:
            found += [digest(batch) for batch, _ in zip(loader, range(count - len(found)), strict=False)]
    return found


def last_batch(trainer: str, folder: Path, *, kind: str) -> Trial:
    """A checkpoint at the last batch of an epoch, of three."""
    cases = legs(trainer, folder, EPOCH + 2, kind=kind, epochs=3, batches=3 * EPOCH, save_every=EPOCH)
    return Trial([(1, case) for case in cases], lambda: expect_resumed(*logs(cases), EPOCH))


def three_epochs(trainer: str, folder: Path, *, kind: str, validate: bool = False) -> Trial:
    """Every epoch is whole; killed in the middle of the second one."""
    settings = {"kind": kind, "epochs": 3, "batches": 3 * EPOCH, "save_every": 5, "validate": validate}
    cases = legs(trainer, folder, random.randint(21, 25), **settings)

    def check() -> None:
        if batches(cases[0]) != passes(trainer, folder, kind, 3 * EPOCH):
            raise Differs(f"{len(batches(cases[0]))} batches in three epochs, or other ones than without a trainer")
        expect_resumed(*logs(cases), saved_before(len(logs(cases)[1]), 5))
        if validate:
            check_validations(*logs(cases, train=False))

    return Trial([(1, case) for case in cases], check)


def epochs_on_other_ranks(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Three epochs with a length, begun on `before` ranks and ended on `after`: no slot is left out or too many."""
    kill_at = random.choice([5, 6, 7, 13, 14, 15, 21, 22, 23])  # after fewer or more batches than an epoch has
    settings = {"kind": "counted", "epochs": 3, "batches": 3 * EPOCH, "save_every": 4, "workers": 1}
    _, killed, resumed = legs(trainer, folder, kill_at, **settings)

    def check() -> None:
        expected = passes(trainer, folder, "counted", 3 * EPOCH)
        first = saved_before(kill_at, 4) * before
        for rank in range(before):
            check_slots(batches(killed, rank), expected, rank, before, 0)
        for rank in range(after):
            found = batches(resumed, rank)
            check_slots(found, expected, rank, after, first)
            if len(found) * after != len(expected) - first:
                raise Differs(f"from slot {first} on, rank {rank} of {after} saw {len(found)} batches")

    return Trial([(before, killed), (after, resumed)], check)


def check_validations(straight: Log, killed: Log, resumed: Log) -> None:
    """Each validation sees the same batches; a resumed run scores as one that never stopped."""
    seen = [batch for batch, _ in straight]
    each = len(set(seen))
    seen = seen[len(seen) % max(each, 1) :]  # behind a sanity check
    if not seen or any(seen[i : i + each] != seen[:each] for i in range(0, len(seen), each)):
        raise Differs("validations differ in their batches")
    if resumed[-2 * each :] != straight[-2 * each :]:  # after the second and third epoch
        raise Differs("the resumed run's validations score otherwise")


CASES: dict[str, Plan] = {
    "kill, 0 workers": partial(one_rank, workers=0),
    "kill, 2 workers": partial(one_rank, workers=2),
    "accumulate 2": partial(one_rank, accumulate=2),
    "2 ranks": two_ranks,
    "dp 2 × tp 2": dp_by_tp,
    "2 → 1 ranks": partial(other_ranks, before=2, after=1),
    "1 → 2 ranks": partial(other_ranks, before=1, after=2),
    "best of 2 ranks": partial(keeps_the_best, before=2, after=2),
    "best, 2 → 1 ranks": partial(keeps_the_best, before=2, after=1),
    "best, 1 → 2 ranks": partial(keeps_the_best, before=1, after=2),
    "last batch, length": partial(last_batch, kind="counted"),
    "last batch, no length": partial(last_batch, kind="packed"),
    "3 epochs, length": partial(three_epochs, kind="counted"),
    "3 epochs, no length": partial(three_epochs, kind="packed"),
    "3 epochs, 2 → 1 ranks": partial(epochs_on_other_ranks, before=2, after=1),
    "3 epochs, 1 → 2 ranks": partial(epochs_on_other_ranks, before=1, after=2),
    "validation": partial(three_epochs, kind="counted", validate=True),
}
_OWN_LOOP = {"accumulate 2", "validation"}  # the page's loop has neither
_ONE_PASS = {case for case in CASES if case.startswith(("last batch", "3 epochs"))}
LEFT_OUT = {
    "torch": _OWN_LOOP,
    "fsdp2": _OWN_LOOP,
    "fabric": _OWN_LOOP,
    "accelerate": {"validation"},
    "deepspeed": {"validation"},
} | {
    "torchtitan": _OWN_LOOP | _ONE_PASS,
    "composer": {"accumulate 2"},  # it cuts a batch into micro-batches, and takes no two for a step
    "megatron": _OWN_LOOP | _ONE_PASS,
}
_BEST = {case for case in CASES if case.startswith("best")}  # an option of Hugging Face's
for _trainer in ("hf", "trl"):
    LEFT_OUT[_trainer] = {"dp 2 × tp 2"}
for _trainer in ("torch", "fsdp2", "accelerate", "fabric", "lightning", "deepspeed", "torchtitan", "composer"):
    LEFT_OUT[_trainer] = LEFT_OUT.get(_trainer, set()) | {"dp 2 × tp 2"} | _BEST
LEFT_OUT["megatron"] |= _BEST

"""Cases of the table trainer × case: runs that are killed and resumed, beside runs that never stopped."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from tests.support.toy_training import LANES, SAMPLES, read_log, write_training_shards
from tests.trainers.drive import Case, make_evaluation, pipeline_for

EPOCH = SAMPLES // 4  # batches
WITHOUT_DROPOUT = {"torch", "fsdp2", "megatron"}  # a batch scores the same on any rank that has the same weights
VALIDATED = {"lightning": 3, "composer": 3}  # batches of each validation; the others' take all
Log = list[tuple[str, str]]  # the hash and the loss of each batch


class Differs(AssertionError):
    """Difference from the uninterrupted run."""


def drive(cases: list[Case], *tests: str, python: str = sys.executable) -> None:
    """Run cases, and files of tests, in separate processes.

    Raises `Differs` with the end of their output if one fails.
    """
    command = [python, "-m", "tests.trainers.drive", *(case.text for case in cases), *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise Differs(f"the process ended with {done.returncode}:\n{done.stdout[-9000:]}\n{done.stderr[-3000:]}")


def three_runs(trainer: str, folder: Path, kill_at: int, **settings: object) -> list[Case]:
    """Return an uninterrupted run, one killed after `kill_at` batches, and one that resumes from its checkpoint."""
    if not (folder / "shards").exists():
        write_training_shards(folder / "shards")
    straight = Case(trainer, str(folder), "straight", "straight", **settings)  # type: ignore[arg-type]
    killed = replace(straight, run="killed", log="killed", kill_at=kill_at)
    return [straight, killed, replace(killed, log="resumed", kill_at=None, resume=True)]


def logs(cases: list[Case], *, rank: int = 0, train: bool = True) -> list[Log]:
    return [read_log(case.log_of(rank), train=train) for case in cases]


def expect_resumed(found: list[Log], saved_at: int) -> None:
    """Raise `Differs` unless both runs saw the batches of the uninterrupted one, the last from `saved_at` on."""
    straight, killed, resumed = found
    if killed != straight[: len(killed)] or len(killed) < saved_at:
        raise Differs(f"the killed run differs at batch {first_difference(killed, straight)}")
    expected = straight[saved_at:]
    if resumed != expected:
        at = first_difference(resumed, expected)
        same = [batch for batch, _ in resumed] == [batch for batch, _ in expected]
        which = "another loss, of the same batches," if same else "another"
        raise Differs(f"resumed at {saved_at}: {len(resumed)} batches for {len(expected)}, {which} at {at}")


def first_difference(found: Log, expected: Log) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(map(len, (found, expected)))
    )


def saved_before(kill_at: int, save_every: int) -> int:
    return kill_at // save_every * save_every


@dataclass(frozen=True)
class Trial:
    """Runs in their order, and a function that checks their logs, and raises `Differs`."""

    runs: list[Case]
    check: Callable[[], None]

    @property
    def on_one_rank(self) -> bool:
        return all(case.ranks == 1 for case in self.runs)


Plan = Callable[[str, Path], Trial]


def one_rank(trainer: str, folder: Path, **settings: object) -> Trial:
    """Kill at a random batch after the first checkpoint, and resume, on one rank."""
    kill_at = random.randint(5, 8)
    cases = three_runs(trainer, folder, kill_at, **settings)
    return Trial(cases, lambda: expect_resumed(logs(cases), saved_before(kill_at, 4)))


def two_ranks(trainer: str, folder: Path) -> Trial:
    """Kill at a random step, and resume, on two ranks."""
    cases = three_runs(trainer, folder, random.randint(5, 7), workers=1, ranks=2)

    def check() -> None:
        for rank in range(2):
            expect_resumed(logs(cases, rank=rank), 4)
        if logs(cases)[0] == logs(cases, rank=1)[0]:
            raise Differs("both ranks saw the same batches")

    return Trial(cases, check)


def dp_by_tp(trainer: str, folder: Path) -> Trial:
    """Kill and resume two data-parallel ranks of two processes each, which get equal batches."""
    cases = three_runs(trainer, folder, random.randint(5, 7), workers=0, ranks=4)

    def check() -> None:
        for rank in range(4):
            expect_resumed(logs(cases, rank=rank), 4)
        seen = [batches(cases[0], rank) for rank in range(4)]
        if seen[0] != seen[1] or seen[2] != seen[3] or seen[0] == seen[2]:
            raise Differs("peers saw different batches, or data-parallel ranks the same ones")

    return Trial(cases, check)


def shared(trainer: str, folder: Path, *, before: tuple[int, int], after: tuple[int, int]) -> Trial:
    """Kill and resume on processes that share batches. `before` and `after` are numbers of processes and of peers."""
    _, killed, resumed = three_runs(trainer, folder, 6, workers=1)
    killed = replace(killed, ranks=before[0], peers=before[1])
    resumed = replace(resumed, ranks=after[0], peers=after[1])

    def check() -> None:
        slots, first = loader_batches(trainer, folder, "endless", 60), 4 * before[0] // before[1]
        check_shared(killed, slots, 0)
        check_shared(resumed, slots, first)
        if before == after:
            for process in range(before[0]):
                was, now = logs([killed, resumed], rank=process)
                if now[0] != was[4] or len(now) != 8:
                    raise Differs(f"process {process} resumed with {len(now)} batches, the first with another loss")

    return Trial([killed, resumed], check)


def check_shared(case: Case, slots: list[str], first: int) -> None:
    """Raise `Differs` unless each process saw the batches of its data-parallel rank, and all saw equally many."""
    ranks = case.ranks // case.peers
    for process in range(case.ranks):
        found = batches(case, process)
        check_slots(found, slots, (process // case.peers - first) % ranks, ranks, first)
        if len(found) < (4 if case.is_killed else 8):
            raise Differs(f"process {process} saw {len(found)} batches")


def shared_epochs(trainer: str, folder: Path) -> Trial:
    """Run three epochs with a length on two data-parallel ranks of two processes, killed in the second."""
    settings = {"kind": "counted", "epochs": 3, "batches": 3 * EPOCH // 2, "workers": 1, "ranks": 4, "peers": 2}
    _, killed, resumed = three_runs(trainer, folder, random.choice([13, 14, 15]), **settings)

    def check() -> None:
        slots = loader_batches(trainer, folder, "counted", 3 * EPOCH)
        check_shared(killed, slots, 0)
        check_shared(resumed, slots, 2 * 12)
        if any(len(batches(resumed, process)) != 3 * EPOCH // 2 - 12 for process in range(4)):
            raise Differs("the resumed run has not trained on the whole epochs")

    return Trial([killed, resumed], check)


def other_ranks(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Kill on `before` ranks, and resume on `after`. Slots and weights continue where they were."""
    _, killed, resumed = three_runs(trainer, folder, 6, workers=1)

    def check() -> None:
        expected = loader_batches(trainer, folder, "endless", 30)
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

    return Trial([replace(killed, ranks=before), replace(resumed, ranks=after)], check)


def batches(case: Case, rank: int = 0) -> list[str]:
    return [batch for batch, _ in read_log(case.log_of(rank))]


def check_slots(found: list[str], slots: list[str], rank: int, ranks: int, first: int) -> None:
    wanted = slots[first + rank :: ranks][: len(found)]
    if found != wanted:
        raise Differs(f"from slot {first} on, rank {rank} of {ranks} saw other batches than those of its slots")


def loader_batches(trainer: str, folder: Path, kind: str, count: int) -> list[str]:
    """Return the batches of a loader without a trainer, over the ends of epochs."""
    found: list[str] = []
    with sp.SavableLoader(pipeline_for(trainer, folder, kind), seed=7, lanes=LANES) as loader:
        while len(found) < count:
            found += [digest(batch) for batch, _ in zip(loader, range(count - len(found)), strict=False)]
    return found


def last_batch(trainer: str, folder: Path, *, kind: str) -> Trial:
    """Save a checkpoint at the last batch of an epoch, and run three epochs."""
    cases = three_runs(trainer, folder, EPOCH + 2, kind=kind, epochs=3, batches=3 * EPOCH, save_every=EPOCH)
    return Trial(cases, lambda: expect_resumed(logs(cases), EPOCH))


def three_epochs(trainer: str, folder: Path, *, kind: str, validate: bool = False) -> Trial:
    """Run three complete epochs, killed in the middle of the second."""
    settings = {"kind": kind, "epochs": 3, "batches": 3 * EPOCH, "save_every": 5, "validate": validate}
    cases = three_runs(trainer, folder, random.randint(21, 25), **settings)

    def check() -> None:
        if batches(cases[0]) != loader_batches(trainer, folder, kind, 3 * EPOCH):
            raise Differs(f"{len(batches(cases[0]))} batches in three epochs, or other ones than without a trainer")
        expect_resumed(logs(cases), saved_before(len(logs(cases)[1]), 5))
        if validate:
            check_validations(cases)

    return Trial(cases, check)


def ends_of_epochs(
    trainer: str, folder: Path, *, checkpoints: str, kind: str = "counted", ended_by: str = "kill"
) -> Trial:
    """Save checkpoints only at the ends of four epochs.

    The run is killed in the third epoch, or in the validation of the second, or ends after two epochs (`ended_by`).
    """
    kill_at = 2 * EPOCH + random.randint(1, EPOCH)
    settings = {"kind": kind, "epochs": 4, "batches": 4 * EPOCH, "validate": True, "checkpoints": checkpoints}
    straight, first, resumed = three_runs(trainer, folder, kill_at, **settings)
    if ended_by == "kill in a validation":
        sanity, each = 2, VALIDATED[trainer]
        first = replace(first, kill_at=None, kill_evaluating=sanity + each + random.randrange(each))
    elif ended_by == "max_epochs":
        first = replace(first, kill_at=None, epochs=2, batches=2 * EPOCH)
    cases = [straight, first, resumed]

    def check() -> None:
        expect_resumed(logs(cases), EPOCH if ended_by == "kill in a validation" else 2 * EPOCH)
        if len(logs(cases)[0]) != 4 * EPOCH:
            raise Differs(f"{len(logs(cases)[0])} batches in four epochs")

    return Trial(cases, check)


def epochs_on_other_ranks(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Start three epochs with a length on `before` ranks, and end on `after`. Each slot is used once."""
    kill_at = random.choice([5, 6, 7, 13, 14, 15, 21, 22, 23])  # after fewer or more batches than an epoch has
    settings = {"kind": "counted", "epochs": 3, "batches": 3 * EPOCH, "save_every": 4, "workers": 1}
    _, killed, resumed = three_runs(trainer, folder, kill_at, **settings)
    saved_at = saved_before(kill_at, 4)
    first = saved_at * before
    # Where the page's loop counts steps, that is where three epochs end on these ranks; a trainer finds that out.
    resumed = replace(resumed, batches=saved_at + (3 * EPOCH - first) // after)

    def check() -> None:
        expected = loader_batches(trainer, folder, "counted", 3 * EPOCH)
        for rank in range(before):
            check_slots(batches(killed, rank), expected, rank, before, 0)
        for rank in range(after):
            found = batches(resumed, rank)
            check_slots(found, expected, rank, after, first)
            if len(found) * after != len(expected) - first:
                raise Differs(f"from slot {first} on, rank {rank} of {after} saw {len(found)} batches")

    return Trial([replace(killed, ranks=before), replace(resumed, ranks=after)], check)


def check_validations(cases: list[Case]) -> None:
    """Check that each validation sees the first batches of its loader, and that a resumed run scores equally."""
    straight, _, resumed = logs(cases, train=False)
    slots = evaluation_slots(cases[0])
    each = VALIDATED.get(cases[0].trainer, len(slots))
    check = len(straight) % each  # batches of a sanity check
    validations, rest = divmod(len(straight) - check, each)
    if rest or validations < 3 or [batch for batch, _ in straight] != slots[:check] + slots[:each] * validations:
        raise Differs(f"{len(straight)} batches of validations, or other ones than the first {each} of the loader")
    if resumed[-2 * each :] != straight[-2 * each :]:  # after the second and third epoch
        raise Differs("the resumed run's validations score otherwise")


def evaluation_slots(case: Case) -> list[str]:
    """Return the batches of the loader for evaluation, as models get them."""
    return [digest({name: part for name, part in batch.items() if name != "valid"}) for batch in make_evaluation(case)]

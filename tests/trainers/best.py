"""The cases of a run that evaluates with each save, keeps the best checkpoint and loads it at its end."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from tests.trainers.cases import (
    Differs,
    Trial,
    batches,
    check_slots,
    evaluation_slots,
    expect_resumed,
    loader_batches,
    logs,
    saved_before,
    three_runs,
)
from tests.trainers.drive import Case


def keeps_the_best(trainer: str, folder: Path, *, before: int, after: int) -> Trial:
    """Save at each evaluation, and keep the best and the last. Kill after a rotation, and resume on `after` ranks."""
    kill_at = random.choice([7, 9])
    saved_at = saved_before(kill_at, 2)
    straight, killed, resumed = three_runs(trainer, folder, kill_at, workers=1, save_every=2, best=True)

    def check() -> None:
        expected = loader_batches(trainer, folder, "endless", 30)
        first = saved_at * before
        for rank in range(before):
            check_slots(batches(killed, rank), expected, rank, before, 0)
        for rank in range(after):
            check_slots(batches(resumed, rank), expected, rank, after, first)
            check_evaluations(resumed, rank, after, (resumed.batches - saved_at) // 2)
            if before == after:
                expect_resumed(logs([straight, killed, resumed], rank=rank), saved_at)
                scored = logs([straight, resumed], rank=rank, train=False)
                if scored[1] != scored[0][-len(scored[1]) :]:
                    raise Differs(f"rank {rank}: the resumed run's evaluations score otherwise")
        check_best(resumed, saved_at)
        if before == after and weights_of(resumed) != weights_of(straight):
            raise Differs("the run that never stopped kept other checkpoints, or loaded another at its end")

    runs = [straight, killed] if before == after else [killed]
    return Trial([*(replace(case, ranks=before) for case in runs), replace(resumed, ranks=after)], check)


def check_evaluations(case: Case, rank: int, ranks: int, count: int) -> None:
    slots = evaluation_slots(case)
    if [batch for batch, _ in logs([case], rank=rank, train=False)[0]] != slots[rank::ranks] * count:
        raise Differs(f"rank {rank} of {ranks} evaluated on other batches than those of its slots")


def check_best(case: Case, saved_at: int) -> None:
    """Check that the best checkpoint of all evaluations is kept beside the last one, and was loaded."""
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
    """Return the weights of each kept checkpoint, and of the model that was loaded at the end."""
    folders = {path.name: path for path in Path(case.folder, case.run, "run").glob("checkpoint-*")}
    folders["loaded"] = case.loaded
    return {name: (folder / "model.safetensors").read_bytes() for name, folder in folders.items()}

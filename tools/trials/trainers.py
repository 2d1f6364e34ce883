"""Tries the loader in trainers, each in an environment of its own, and prints a table trainer × case.

    python tools/trials/trainers.py                         all of them
    python tools/trials/trainers.py hf lightning            these
    python tools/trials/trainers.py --python .venv/bin/python hf --case "2 ranks"

Runs are killed by SIGKILL at a random step and resumed by the trainer's own mechanism; "exact" means that every batch
(by hash) and every loss (by its bits) is that of a run that never stopped. With other ranks than before, batches are
compared slot by slot.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.trainers.cases import Differs, drive  # noqa: E402
from tests.trainers.drive import Case  # noqa: E402
from tests.trainers.table import CASES, LEFT_OUT  # noqa: E402

# What a trainer needs beside the package: its extra, and older releases where it asks for them.
ENVIRONMENTS = {
    "torch": [".", "torch"],
    "fsdp2": [".", "torch"],
    "accelerate": [".[accelerate]", "transformers"],
    "fabric": [".[lightning]", "transformers"],
    "lightning": [".[lightning]", "transformers"],
    "hf": [".[hf]"],
    "trl": [".[hf]", "trl"],
    "grpo": [".[hf]", "trl"],
    "deepspeed": [".[deepspeed]"],
    "torchtitan": [".[torchtitan]"],
    "megatron": [".", "megatron-core>=0.16"],
    "composer": [".[composer]"],
}
REFUSALS = "what it refuses"  # tests/trainers/refusals, for those that have a file there
_TESTS = ["pytest", "pytest-timeout", "hypothesis"]  # what the tests' own modules import, and a limit of their time


def environment(trainer: str, folder: Path) -> str:
    """The interpreter of an environment that has the trainer; made where it is not there yet."""
    target = folder / trainer
    python = target / "bin" / "python"
    sibling = Path(sys.executable).with_name("uv")  # where README's commands put it
    uv = str(sibling) if sibling.exists() else "uv"
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, target], check=True, cwd=ROOT)
    editable = ["-e", ENVIRONMENTS[trainer][0], *ENVIRONMENTS[trainer][1:]]
    subprocess.run([uv, "pip", "install", "-q", "-p", python, *editable, *_TESTS], check=True, cwd=ROOT)
    return str(python)


def tried(trainer: str, cases: list[str], python: str, folder: Path) -> dict[str, str]:
    """By case: "exact", "–" where the trainer's page has no such thing, or "DIFFERS", and what did on stderr."""
    found = dict.fromkeys(cases, "–")
    wanted = [case for case in cases if case not in LEFT_OUT.get(trainer, ()) and case != REFUSALS]
    trials = {case: CASES[case](trainer, new(folder, f"{i}")) for i, case in enumerate(wanted)}
    together = {case: trial for case, trial in trials.items() if trial.on_one_rank}
    output = driven([case for trial in together.values() for _, case in trial.runs], python, 1)
    for case, trial in {**together, **trials}.items():
        if case not in together:
            output = "".join(driven([run], python, ranks) for ranks, run in trial.runs)
        try:
            trial.check()
            found[case] = "exact"
        except Differs as difference:
            print(f"{trainer}, {case}: {difference}\n{output}", file=sys.stderr)
            found[case] = "DIFFERS"
        print(f"{trainer:12} {case:24} {found[case]}", flush=True)
    tests = ROOT / f"tests/trainers/refusals/{trainer}.py"
    if REFUSALS in cases and tests.exists():
        found[REFUSALS] = refusals(tests, python)
    return found


def refusals(tests: Path, python: str) -> str:
    try:
        drive([], str(tests), python=python)
    except Differs as failure:
        print(failure, file=sys.stderr)
        return "FAILS"
    return "passes"


def driven(cases: list[Case], python: str, ranks: int) -> str:
    """Run these; what they say of it if they do not end well."""
    try:
        drive(cases, python=python, ranks=ranks)
    except Differs as difference:
        return str(difference)
    return ""


def new(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", choices=[*ENVIRONMENTS, []], help="default: all")
    parser.add_argument("--case", action="append", choices=[*CASES, REFUSALS], help="only this one; may be given again")
    parser.add_argument("--python", help="an interpreter that has the trainers, in the place of environments made here")
    parser.add_argument("--environments", type=Path, default=ROOT / ".trainers", help="the folder of the environments")
    options = parser.parse_args()
    trainers, cases = options.trainers or list(ENVIRONMENTS), options.case or [*CASES, REFUSALS]
    rows = {}
    for trainer in trainers:
        python = options.python or environment(trainer, options.environments)
        with tempfile.TemporaryDirectory(prefix=f"{trainer}_") as folder:
            rows[trainer] = tried(trainer, cases, python, Path(folder))
    print("\n| case |", " | ".join(trainers), "|\n|---|" + "---|" * len(trainers))
    for case in cases:
        print(f"| {case} |", " | ".join(rows[trainer][case] for trainer in trainers), "|")
    sys.exit(any(found not in ("exact", "passes", "–") for row in rows.values() for found in row.values()))


if __name__ == "__main__":
    main()

"""Run the loader in trainers, each in its own environment, and print a table of trainers and cases.

    python tools/trials/trainers.py                         all of them
    python tools/trials/trainers.py hf lightning            these alone
    python tools/trials/trainers.py --python .venv/bin/python hf --case "2 ranks"

Runs are killed by SIGKILL at a random step, and resumed by the trainer's own mechanism. "exact" means that every batch
(by hash) and every loss (by its bits) equals that of an uninterrupted run. If a run resumes on other ranks, batches are
compared by slot.
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

# The packages that each trainer needs.
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
REJECTIONS = "rejections"  # the case of tests/trainers/refusals/TRAINER.py, if there is such a file
_TESTS = ["pytest", "pytest-timeout", "hypothesis"]  # packages that the tests need


def environment(trainer: str, folder: Path) -> str:
    """Return the interpreter of an environment with the trainer. It is created if it is missing."""
    target = folder / trainer
    python = target / "bin" / "python"
    sibling = Path(sys.executable).with_name("uv")  # the README installs uv there
    uv = str(sibling) if sibling.exists() else "uv"
    if not python.exists():
        subprocess.run([uv, "venv", "-q", "--python", sys.executable, target], check=True, cwd=ROOT)
    editable = ["-e", ENVIRONMENTS[trainer][0], *ENVIRONMENTS[trainer][1:]]
    subprocess.run([uv, "pip", "install", "-q", "-p", python, *editable, *_TESTS], check=True, cwd=ROOT)
    return str(python)


def try_trainer(trainer: str, cases: list[str], python: str, folder: Path) -> dict[str, str]:
    """Run cases of a trainer.

    Returns:
        By case: "exact", "DIFFERS" (with details on stderr), or "–" if the trainer does not support the case.
    """
    results = dict.fromkeys(cases, "–")
    wanted = [case for case in cases if case not in LEFT_OUT.get(trainer, ()) and case != REJECTIONS]
    trials = {case: CASES[case](trainer, new_folder(folder, f"{i}")) for i, case in enumerate(wanted)}
    together = {case: trial for case, trial in trials.items() if trial.on_one_rank}
    output = run_cases([case for trial in together.values() for case in trial.runs], python)
    for case, trial in {**together, **trials}.items():
        if case not in together:
            output = run_cases(trial.runs, python)
        try:
            trial.check()
            results[case] = "exact"
        except Differs as difference:
            print(f"{trainer}, {case}: {difference}\n{output}", file=sys.stderr)
            results[case] = "DIFFERS"
        print(f"{trainer:12} {case:24} {results[case]}", flush=True)
    tests = ROOT / f"tests/trainers/refusals/{trainer}.py"
    if REJECTIONS in cases and tests.exists():
        failures = run_cases([], python, str(tests))
        print(failures, file=sys.stderr, end="")
        results[REJECTIONS] = "FAILS" if failures else "passes"
    return results


def run_cases(cases: list[Case], python: str, *tests: str) -> str:
    """Run cases and files of tests, and return their output if they fail, else ""."""
    try:
        drive(cases, *tests, python=python)
    except Differs as difference:
        return str(difference)
    return ""


def new_folder(folder: Path, name: str) -> Path:
    """Create a folder, and return its path."""
    (folder / name).mkdir()
    return folder / name


def main() -> None:
    """Run the trainers that the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainers", nargs="*", choices=[*ENVIRONMENTS, []], help="default: all")
    parser.add_argument("--case", action="append", choices=[*CASES, REJECTIONS], help="only this case; may be repeated")
    parser.add_argument("--python", help="an interpreter that has the trainers; default: an environment for each")
    parser.add_argument("--environments", type=Path, default=ROOT / ".trainers", help="the folder of the environments")
    options = parser.parse_args()
    trainers, cases = options.trainers or list(ENVIRONMENTS), options.case or [*CASES, REJECTIONS]
    rows = {}
    for trainer in trainers:
        python = options.python or environment(trainer, options.environments)
        with tempfile.TemporaryDirectory(prefix=f"{trainer}_") as folder:
            rows[trainer] = try_trainer(trainer, cases, python, Path(folder))
    print("\n| case |", " | ".join(trainers), "|\n|---|" + "---|" * len(trainers))
    for case in cases:
        print(f"| {case} |", " | ".join(rows[trainer][case] for trainer in trainers), "|")
    sys.exit(any(result not in ("exact", "passes", "–") for row in rows.values() for result in row.values()))


if __name__ == "__main__":
    main()

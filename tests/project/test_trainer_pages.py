"""The scripts on the pages of the trainers run as they are, end, save and go on, where their trainer is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.pages import ROOT, blocks_of

NEEDS = {
    "torch": "torch",
    "accelerate": "accelerate",
    "fabric": "lightning",
    "lightning": "lightning",
    "hf": "transformers",
    "trl": "trl",
    "grpo": "trl",
    "deepspeed": "deepspeed",
    "torchtitan": "torchtitan",
    "megatron": "megatron.core",
    "composer": "composer",
}
FOLDER = ROOT / "docs/trainers"
BY_A_TRIAL = {"async_grpo", "savable_verl"}  # modules to be copied, no scripts


def _is_installed(module: str) -> bool:
    """Megatron-Energon shares the folder of Megatron's packages: `megatron` alone says nothing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.landing
def test_trainer_scripts_run_unchanged_and_resume_when_run_again(tmp_path: Path) -> None:
    installed = [trainer for trainer, module in NEEDS.items() if _is_installed(module)]
    assert "torch" in installed
    command = [sys.executable, "-m", "tests.support.page_scripts", str(tmp_path), *installed]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-6000:]}"


def scripts() -> dict[str, str]:
    """By title: those on the pages, and those beside them."""
    blocks = [block for page in FOLDER.glob("*.md") for block in blocks_of(page) if (block.title or "").endswith(".py")]
    beside = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    found = {str(block.title): block.text for block in blocks} | beside
    assert len(found) == len(blocks) + len(beside), "each once"
    return found


def test_each_trainer_has_its_script_with_a_guard() -> None:
    found = {title.removeprefix("train_").removesuffix(".py"): text for title, text in scripts().items()}
    named = {"trl": "sft"}
    assert {named.get(trainer, trainer) for trainer in NEEDS} | BY_A_TRIAL | {"images", "images_sft"} == found.keys()
    for trainer in found.keys() - BY_A_TRIAL - {"images"}:
        assert re.search(r'^if __name__ == "__main__":\n    main\(\)\n\Z', found[trainer], re.MULTILINE), trainer


def test_script_of_a_page_is_linked_and_matches_the_shown_lines() -> None:
    for path in FOLDER.glob("*.py"):
        (page,) = [page for page in FOLDER.glob("*.md") if f"]({path.name})" in page.read_text()]
        lines = {line.strip() for line in path.read_text().splitlines()}
        shown = [block for block in blocks_of(page) if block.why == f"lines of {path.name}"]
        assert len(shown) == (path.stem not in BY_A_TRIAL)
        assert not [line for block in shown for line in block.text.splitlines() if line.strip() not in lines], path


def test_each_script_with_a_causal_model_uses_model_inputs() -> None:
    causal = {title: text for title, text in scripts().items() if "ForCausalLM" in text}
    causal.pop("train_grpo.py")  # whose batches are prompts
    assert set(causal) == {f"train_{name}.py" for name in ("accelerate", "fabric", "hf", "lightning", "sft")}
    for title, script in causal.items():
        assert re.search(r"\bmodel_inputs\((super\(\)\.batch|batch)", script), title
        assert "cross_entropy" not in script and "masked_fill" not in script, f"{title}: labels of its own"


@pytest.mark.parametrize("name", sorted(BY_A_TRIAL))
def test_module_of_a_page_compiles_and_is_used_by_its_trial(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    compile(text, name, "exec")
    trials = [path.read_text() for path in (ROOT / "tools/trials").glob("*.py")]
    assert any(f'ROOT / "docs/trainers/{name}.py"' in trial for trial in trials)

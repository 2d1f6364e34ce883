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
BY_A_TRIAL = {"verl"}  # what its page shows is no script but a module that verl imports


def _is_installed(module: str) -> bool:
    """Megatron-Energon shares the folder of Megatron's packages: `megatron` alone says nothing."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.landing
def test_the_scripts_run_as_they_are_and_go_on_when_they_are_run_again(tmp_path: Path) -> None:
    installed = [trainer for trainer, module in NEEDS.items() if _is_installed(module)]
    assert "torch" in installed
    command = [sys.executable, "-m", "tests.support.page_scripts", str(tmp_path), *installed, "elastic"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-6000:]}"


def test_each_page_of_a_trainer_has_its_script_with_a_guard() -> None:
    pages = [page for page in (ROOT / "docs/trainers").glob("*.md") if page.stem not in {"index", *BY_A_TRIAL}]
    assert len(pages) == len(NEEDS) - 1  # TRL's page has two
    for page in pages:
        scripts = [block for block in blocks_of(page) if (block.title or "").startswith("train_")]
        assert len(scripts) == 1 + (page.stem == "trl"), page
        for script in scripts:
            assert re.search(r'^if __name__ == "__main__":\n    main\(\)\n\Z', script.text, re.MULTILINE), script.place


def test_each_script_with_a_causal_model_gives_it_what_model_inputs_makes() -> None:
    scripts = [block for page in (ROOT / "docs/trainers").glob("*.md") for block in blocks_of(page) if block.title]
    causal = {str(block.title): block.text for block in scripts if "ForCausalLM" in block.text}
    causal.pop("train_grpo.py")  # whose batches are prompts
    assert set(causal) == {f"train_{name}.py" for name in ("accelerate", "fabric", "hf", "lightning", "sft")}
    for title, script in causal.items():
        assert re.search(r"\bmodel_inputs\((super\(\)\.batch|batch)", script), title
        assert "cross_entropy" not in script and "masked_fill" not in script, f"{title}: labels of its own"


def test_the_module_on_the_page_of_verl_is_the_one_that_its_trial_runs() -> None:
    (module,) = [block for block in blocks_of(ROOT / "docs/trainers/verl.md") if block.title]
    trial = (ROOT / "tools/trials/verl_loader.py").read_text()
    assert f'title="{module.title}"' in trial and module.why and "tools/trials/verl_loader.py" in module.why
    compile(module.text, str(module.title), "exec")

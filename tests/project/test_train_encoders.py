"""The trainers of the encoders in small: each model learns from its loader; one is killed and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoder_data
import pytest
import quickstart
import torch
import train_encoders

from tests.support.toy_samples import python_sources

RECIPES = {recipe.name: recipe for recipe in train_encoders.RECIPES}


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], quickstart.Recipe]:
    """Return a recipe by its name, its shards and tokenizer made, with a tenth of the data."""
    pytest.importorskip("sklearn", reason="the extra [quickstart]")
    few = encoder_data.digits()[:180]
    monkeypatch.setattr(encoder_data, "digits", lambda: few)

    def prepare(name: str) -> quickstart.Recipe:
        recipe = replace(RECIPES[name], write_files=write_sources) if name == "text" else RECIPES[name]
        quickstart.prepare(recipe, tmp_path)
        train_encoders.train_tokenizer(tmp_path / "tokenizer.json")
        return recipe

    return prepare


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several would wait for each other where other tests run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_sources(folder: Path) -> None:
    """Some of Python's source."""
    for name, text in python_sources():
        (folder / f"{name}.py").write_text(text)


@pytest.mark.landing
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "chat"])
def test_model_learns_from_its_encoders_batches(name: str, prepared: Any, tmp_path: Path) -> None:
    recipe = prepared(name)
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    with recipe.loader(tmp_path, num_workers=0) as loader:
        for _, batch in zip(range(16), loader, strict=False):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-4:]) < 0.97 * sum(losses[:4]), losses


@pytest.mark.long
def test_chat_training_killed_and_resumed_with_other_workers_repeats_every_bit(prepared: Any, tmp_path: Path) -> None:
    recipe = prepared("chat")
    trial = quickstart.kill_and_resume(recipe, tmp_path, steps=20)
    assert trial.difference is None
    assert 12 <= max(trial.killed) < 19
    losses = [float.fromhex(entry["loss"]) for entry in trial.uninterrupted.values()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])

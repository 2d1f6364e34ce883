"""A bare loader refuses trainers that keep rank 0's state only, or are a batch ahead; names those that save none of it;
and refuses to be copied."""

from __future__ import annotations

import copy
import pickle
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader

import savable_pipeline as sp
from savable_pipeline.trainers.device import OnDevice
from savable_pipeline.trainers.trainer_loader import TrainerLoader
from tests.support.toy_pipelines import toy_pipeline


@pytest.fixture
def make(make_shards: Any) -> Any:
    return partial(sp.SavableLoader, partial(toy_pipeline, str(make_shards([40]))), seed=3, lanes=4)


def asked_by(module: str, loader: sp.SavableLoader, method: str = "state_dict") -> Any:
    """What the method gives when that module calls it."""
    names: dict[str, Any] = {"__name__": module}
    exec(f"def ask(loader): return loader.{method}()", names)
    return names["ask"](loader)


LIGHTNING = ("lightning.pytorch.utilities.combined_loader", "pytorch_lightning.utilities.combined_loader")
OTHERS = ("accelerate.checkpointing", "lightning.fabric.strategies.strategy", "lightning_fabric.strategies.fsdp")


@pytest.mark.parametrize("module", OTHERS)
def test_trainers_that_save_only_rank_0_are_rejected_on_several_ranks(make: Any, module: str) -> None:
    assert asked_by(module, make())["slot"] == 0
    with pytest.raises(sp.SavableError, match=r"saves the state of rank 0 only.*savable_pipeline\.trainers"):
        asked_by(module, make(ranks=(0, 2)))


def test_composer_callback_is_rejected_on_several_ranks_unless_the_state_is_global(make: Any) -> None:
    def callback(loader: sp.SavableLoader) -> Any:
        return loader.state_dict()

    names: dict[str, Any] = {"__name__": "composer.core.state"}
    exec("def ask(callbacks, loader): return {i: one(loader) for i, one in enumerate(callbacks)}", names)
    assert names["ask"]([callback], make())[0]["slot"] == 0
    with pytest.raises(sp.SavableError, match=r"Composer saves the state of rank 0 only.*composer\.SavableData"):
        names["ask"]([callback], make(ranks=(0, 2)))


@pytest.mark.parametrize("module", LIGHTNING)
def test_bare_loader_in_lightning_is_always_rejected(make: Any, module: str) -> None:
    with pytest.raises(sp.SavableError, match=r"a batch ahead.*SavableDataModule"):
        asked_by(module, make())


@pytest.mark.parametrize("module", ["torch.distributed.checkpoint.state_dict_saver", "accelerated", "__main__"])
def test_other_callers_get_the_state(make: Any, module: str) -> None:
    assert asked_by(module, make(ranks=(0, 2)))["slot"] == 0


@pytest.mark.parametrize("module", [*OTHERS, *LIGHTNING])
def test_global_state_is_returned(make: Any, module: str) -> None:
    assert asked_by(module, make(), "global_state_dict")["slot"] == 0


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_copying_a_loader_is_an_error_with_a_fix(make: Any, copied: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot be copied or pickled. Create it"):
        copied(make())


@pytest.mark.parametrize("wrap", [lambda loader: loader, TrainerLoader, lambda loader: OnDevice(loader, "cpu")])
@pytest.mark.parametrize("settings", [{}, {"shuffle": True}, {"batch_size": None}])
def test_wrapping_a_loader_in_torchs_dataloader_is_an_error(make: Any, wrap: Any, settings: Any) -> None:
    loader = make()
    with pytest.raises(TypeError, match="length of this loader is not known"):
        len(wrap(loader))
    with pytest.raises(TypeError, match=r"^a SavableLoader is no dataset. Iterate over it"):
        next(iter(DataLoader(wrap(loader), **settings)))


# Trainers that save nothing of it.


def warned(loader: Any, caller: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is logged when that module begins to iterate."""
    caplog.clear()
    asked_by(caller, loader, "__iter__")
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one had been made."""
    state: Any = ModuleType("accelerate.state")
    state.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "accelerate.state", state)


BARE = [lambda loader: loader, lambda loader: OnDevice(loader, "cpu")]


@pytest.mark.parametrize("wrap", BARE)
def test_bare_loader_in_hugging_faces_trainer_warns_that_nothing_saves_it(
    make: Any, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = warned(wrap(make()), "transformers.trainer", caplog)
    assert "Hugging Face's Trainer does not save the state of a SavableLoader" in found and "SavableTrainer" in found
    assert warned(wrap(make()), "__main__", caplog) == []


@pytest.mark.parametrize("wrap", BARE)
@pytest.mark.usefixtures("accelerator")
def test_bare_loader_next_to_an_accelerator_warns_that_nothing_saves_it(
    make: Any, wrap: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = warned(wrap(make()), "__main__", caplog)
    assert "an Accelerator does not save the state" in found and "prepare(accelerator, loader)" in found


@pytest.mark.parametrize("caller", ["transformers.trainer", "__main__"])
@pytest.mark.usefixtures("accelerator")
def test_loaded_evaluated_and_continued_loaders_start_silently(
    make: Any, caller: str, caplog: pytest.LogCaptureFixture
) -> None:
    begun = make()
    next(begun)
    loaded = make()
    loaded.load_state_dict(begun.state_dict())
    for loader in (begun, loaded, TrainerLoader(make()), make(on_iter="restart")):
        assert warned(loader, caller, caplog) == []
    assert next(iter(TrainerLoader(make()))) is not None and not caplog.records


# A run that was restarted, and whose state was forgotten.


@pytest.mark.parametrize("name", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_restarted_job_that_loads_no_state_warns_at_its_first_batch(
    make: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def told(loader: sp.SavableLoader) -> list[str]:
        caplog.clear()
        next(loader)
        next(loader)
        return [record.getMessage() for record in caplog.records if "restarted" in record.getMessage()]

    start = make().state_dict()
    for count in ("0", ""):
        monkeypatch.setenv(name, count)
        assert told(make()) == []
    monkeypatch.setenv(name, "2")
    (found,) = told(make())
    assert found.startswith(f"{name}=2: this job was restarted, but the loader starts at the first batch.")
    assert found.endswith("call load_state_dict first.")
    loaded = make()
    loaded.load_state_dict(start)  # of a run that was saved before its first batch
    assert told(loaded) == told(make(on_iter="restart")) == []

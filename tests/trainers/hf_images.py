"""The page's script trains a small Qwen2.5-VL on packed chats with images: resumed exactly, with its documents' losses.

The expected losses are those of the documents alone, by the processor of `transformers` and the model as it is. Run in
a process that has imported the trainers (`drive.py`); `refusals/trl.py` runs the same for TRL.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig

from savable_pipeline.errors import StateError
from savable_pipeline.stages.batch_difference import digest
from tests.project.pages import ROOT
from tests.support.toy_chats import chats, save_small_qwen, write_chats

NAME = "Qwen/Qwen2.5-VL-3B-Instruct"
SETTINGS = {"max_steps": 4, "save_steps": 2, "use_cpu": True, "bf16": False, "disable_tqdm": True}
TWO = 2  # batches of a step of the optimizer


class Interrupted(Exception):
    pass


class Documents:
    """The chats as the processor of `transformers` writes them, with their answers as labels."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(folder)
        self.by_ids = {}
        for turns, images in chats():
            turns, left = copy.deepcopy(turns), iter(images)
            for part in (part for turn in turns for part in turn["content"] if part["type"] == "image"):
                part["image"] = next(left)
            how = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
            made = dict(processor.apply_chat_template(turns, **how))
            answers = made.pop("assistant_masks").bool()
            made["labels"] = made["input_ids"].masked_fill(~answers, -100)
            self.by_ids[tuple(made["input_ids"][0].tolist())] = made
        assert len(self.by_ids) == len(chats())

    def of(self, row: list[int]) -> Iterator[dict[str, Any]]:
        """Return the documents of a row in order, before its padding."""
        at = 0
        while any(row[at:]):
            (ids,) = [ids for ids in self.by_ids if tuple(row[at : at + len(ids)]) == ids]
            yield self.by_ids[ids]
            at += len(ids)

    @torch.no_grad()
    def loss(self, model: Any, rows: torch.Tensor) -> float:
        """The mean loss of a target, on one document after the other."""
        model.eval()
        found = [(one, int((one["labels"][:, 1:] != -100).sum())) for row in rows.tolist() for one in self.of(row)]
        assert len(found) > len(rows), "packs"
        summed = sum(targets * float(model(**one).loss) for one, targets in found)
        model.train()
        return summed / sum(targets for _, targets in found)


class Notes:
    """Before a trainer: notes each batch and its loss, which it compares with `documents`; ends before batch `stop`."""

    documents: Documents
    seen: list[tuple[str, float]]
    leaks: list[float]  # how much each loss differs if documents attend to the ones before them
    stop: int | None
    model: Any

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if len(self.seen) == self.stop:
            raise Interrupted
        given, expected = dict(inputs), self.documents.loss(self.model, inputs["input_ids"])
        loss = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        assert float(loss) * TWO == pytest.approx(expected, abs=1e-5)
        with torch.no_grad():
            leaking = torch.arange(given["input_ids"].shape[1]).expand_as(given["position_ids"])
            self.leaks.append(abs(float(self.model(**{**given, "position_ids": leaking}).loss) - expected))
        self.seen.append((digest(given), float(loss)))
        return loss


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `chats/` and `qwen/`."""
    folder = tmp_path_factory.mktemp("images")
    write_chats(folder / "chats")
    save_small_qwen(folder / "qwen")
    return folder


def names_of(title: str, base: Path) -> dict[str, Any]:
    """Return the names that a script of the pages defines, with a small model and no workers."""
    text = (
        (ROOT / "docs/trainers" / title)
        .read_text()
        .replace("num_workers=2", "num_workers=0")
        .replace(NAME, str(base / "qwen"))
    )
    names: dict[str, Any] = {"__name__": title.removesuffix(".py")}
    exec(compile(text.replace('"chats/"', repr(str(base / "chats"))), title, "exec"), names)
    return names


def run_script(names: dict[str, Any], trainer: str, base: Path, stop: int | None = None) -> tuple[list[Any], str]:
    """Run the script, and return its batches with their losses, and a hash of the weights at its end."""
    notes = {"documents": Documents(base / "qwen"), "seen": [], "leaks": [], "stop": stop}
    script = {**names, trainer: type("Noted", (Notes, names[trainer]), notes)}
    made = FunctionType(names["main"].__code__, script)()
    # A row of one long document and a short one may show a leak by less.
    assert sum(leak > 1e-4 for leak in notes["leaks"]) >= len(notes["leaks"]) - 1, notes["leaks"]
    weights = [value for _, value in sorted(made.model.state_dict().items())]
    return notes["seen"], digest(weights)


def check_restart(names: dict[str, Any], trainer: str, base: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Compare an uninterrupted run with one that is interrupted in the middle of a step and restarted."""
    names["settings"] |= SETTINGS
    for run in ("straight", "stopped"):
        (folder / run).mkdir()
    patch.chdir(folder / "straight")
    straight, weights = run_script(names, trainer, base)
    assert len(set(straight)) == SETTINGS["max_steps"] * TWO
    patch.chdir(folder / "stopped")
    with pytest.raises(Interrupted):
        run_script(names, trainer, base, stop=2 * TWO + 1)
    assert run_script(names, trainer, base) == (straight[2 * TWO :], weights)


def test_hf_packed_images_have_single_document_losses_also_when_resumed(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of("images.py", base)
    check_restart(names, "SavableTrainer", base, tmp_path, monkeypatch)


def test_hf_weights_with_old_names_are_rejected_if_they_would_not_load(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    names = names_of("images.py", base)
    names["settings"] |= {**SETTINGS, "gradient_accumulation_steps": 1, "learning_rate": 0.1}
    monkeypatch.chdir(tmp_path)
    names["main"]()
    shutil.rmtree("run/checkpoint-4")
    read = AutoModelForImageTextToText.from_pretrained
    weights = read("run/checkpoint-2").state_dict()
    alone = read(base / "qwen")
    alone.load_state_dict(weights)
    alone.save_pretrained("run/checkpoint-2")  # as a trainer without the mixin does
    with pytest.raises(StateError, match=r"lacks \d+ weights, such as 'model\.visual\.\S+ and has 'visual\."):
        names["main"]()
    read("run/checkpoint-2").save_pretrained("run/checkpoint-2", save_original_format=False)
    names["settings"] |= {"max_steps": 2}  # no more, for the weights that are loaded
    resumed = names["main"]().model.state_dict()
    assert digest([*resumed.values()]) == digest([*weights.values()])


def test_hf_packs_are_rejected_with_context_parallelism(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = names_of("images.py", base)
    names["settings"] |= SETTINGS
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names["SavableTrainer"], "train", lambda *_, **__: None)
    trainer = names["main"]()
    monkeypatch.setattr(type(trainer.accelerator), "parallelism_config", ParallelismConfig(cp_size=2), raising=False)
    with pytest.raises(ValueError, match=r"context parallelism has only the causal mask.* Remove the packer"):
        trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)

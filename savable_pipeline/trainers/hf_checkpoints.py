"""Complete checkpoints of Hugging Face's `Trainer`: the state of the data is written first, the trainer's last.

checkpoint-4/   savable_loader.json   model   optimizer   trainer_state.json
checkpoint-8/   savable_loader.json   model                                     the run was killed here: passed over
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from savable_pipeline.core.files import replace_file
from savable_pipeline.errors import StateError
from savable_pipeline.trainers.forms import from_json, to_json

DATA_FILE = "savable_loader.json"
_BEGUN = "checkpoint-is-incomplete.txt"  # what the trainer marks a folder with that it makes on SIGTERM

log = logging.getLogger(__name__)


def begin(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of the data into the folder of a checkpoint, before the trainer writes the rest.

    Args:
        folder: The folder of the checkpoint; made if it does not exist.
        state: The state with the lanes of all ranks.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)  # of one that was saved here before
    replace_file(folder / DATA_FILE, [json.dumps(to_json(state)).encode()], sync=True)


def take_away(folder: Path) -> None:
    """Remove a folder that the trainer made for a checkpoint, if nothing was saved in it.

    Args:
        folder: The folder of the checkpoint.
    """
    with suppress(OSError):
        (folder / _BEGUN).unlink(missing_ok=True)
        folder.rmdir()


def newest_whole(output_dir: Path) -> Path | None:
    """Find the newest complete checkpoint, with a warning that names newer ones.

    Args:
        output_dir: The trainer's folder, of `checkpoint-…` folders.

    Returns:
        Its folder, or None if there is no checkpoint at all.

    Raises:
        StateError: There are checkpoints, but none is complete.
    """
    numbered = {int(path.name[11:]): path for path in output_dir.glob("checkpoint-*") if path.name[11:].isdecimal()}
    passed_over: list[str] = []
    for _, folder in sorted(numbered.items(), reverse=True):
        lacks = _lacks(folder)
        if lacks is None:
            if passed_over:
                log.warning("resuming from %s; newer, but not whole: %s", folder, "; ".join(passed_over))
            return folder
        passed_over.append(f"{folder.name}, whose {lacks}")
    if passed_over:
        raise StateError(f"{output_dir} has no checkpoint that is whole, only {'; '.join(passed_over)}")
    return None


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state of the data in a checkpoint.

    Args:
        folder: The folder of the checkpoint.

    Returns:
        The state with the lanes of all ranks.

    Raises:
        StateError: The checkpoint is incomplete.
    """
    if lacks := _lacks(folder):
        raise StateError(
            f"{folder} is not whole: its {lacks}. Resume from another (resume_from_checkpoint=True takes the newest "
            "whole one), or load a state that you saved yourself into the loader and pass the trainer no checkpoint"
        )
    file = folder / DATA_FILE
    try:
        return from_json(json.loads(file.read_bytes()))
    except ValueError as error:
        raise StateError(f"{file}: no JSON ({error}); resume from another checkpoint") from error


def _lacks(folder: Path) -> str | None:
    """What a checkpoint lacks, in words that follow "whose"; None if it is complete."""
    if not (folder / DATA_FILE).exists():
        return f"{DATA_FILE} is not there: it was saved without SavableTrainer, or a save ended before it began"
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_bytes())
    except FileNotFoundError:
        return f"{TRAINER_STATE_NAME}, which is written last, is not there: the run ended while it was saved"
    except ValueError as error:
        return f"{TRAINER_STATE_NAME}, which is written last, is no JSON ({error}): the run ended while it was saved"
    return None

"""Tries Megatron-LM's provider with one changed import: killed and resumed, on other workers and ranks.

    python tools/trials/energon_provider.py [--runs 3] [--iterations 24]

Each data-parallel rank is a process that takes batches from the loader that the provider made, as Megatron does,
and every few iterations saves what its `save_state` gives into the folder and file that the provider looks for. All
ranks are killed by SIGKILL at some moment; the next leg has other workers, and half of the time other ranks, whose
states are those of the leg before, merged. Every batch must be the one that a run that never stopped has in its slot.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import savable_pipeline as sp  # noqa: E402

EVERY = 3  # iterations between two saves
YAML = """sample_type: {__module__: megatron.energon, __class__: VQASample}
field_map: {image: png, context: 'json[q]', answers: 'json[a]'}
subflavors: {is_llava_training: true, augmentation: true}
"""


def write(folder: Path) -> None:
    """A dataset with the splits that the provider reads."""
    draw = random.Random(1)
    with sp.ShardWriter(folder / "data", max_samples=30) as writer:
        for number in range(240):
            buffer = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(buffer, "png")
            text = "".join(draw.choices("abcdef ", k=draw.randint(3, 60)))
            writer.write({"__key__": f"{number:04d}", "png": buffer.getvalue(), "json": {"q": "?", "a": text}})
    names = [f"{number:06d}.tar" for number in range(8)]
    (folder / "data/.nv-meta/split.yaml").write_text(
        json.dumps({"split_parts": {"train": names[:7], "val": names[7:]}})
    )
    (folder / "data/.nv-meta/dataset.yaml").write_text(YAML)
    (folder / "prompts.json").write_text("{}")


def train(folder: Path, name: str, rank: int, world: int, workers: int, begin: int, end: int) -> None:
    """One rank of a leg: a line `slot hash` for each batch, and a state now and then."""
    from tests.energon.public import megatron_lm, megatron_lm_provider

    args = megatron_lm_provider.ARGS
    args.data_path, args.rank, args.world_size, args.num_workers = str(folder / "data"), rank, world, workers
    args.dataloader_save, args.iteration = str(folder / name), begin
    args.load = str(folder) if begin else None
    megatron_lm.ARGS.packing_buffer_size, megatron_lm.ARGS.prompt_path = 6, str(folder / "prompts.json")
    provider: Any = megatron_lm_provider.train_valid_test_dataloaders_provider
    loader, valid, _ = provider(None)
    slot = begin
    with (folder / name / f"rank{rank}.log").open("a") as log:
        while slot < end:
            batch = next(loader)
            log.write(f"{slot + (rank - slot) % world} {digest(batch)}\n")  # slot q is rank q mod world's
            log.flush()
            slot += world
            if slot % EVERY == 0:
                [next(each) for each in valid]
                save(folder / name / f"iter_{slot:07d}", rank, loader.save_state())


def save(folder: Path, rank: int, state: Any) -> None:
    """The state as Megatron saves it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"train_dataloader_dprank{rank:03d}.pt"
    torch.save({"dataloader_state_dict": state}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def digest(batch: dict[str, Any]) -> str:
    """A hash of every bit of a batch."""
    raw = [(name, value.numpy().tobytes() if hasattr(value, "numpy") else value) for name, value in batch.items()]
    return hashlib.sha256(repr([each for each in raw if each[0] != "__sources__"]).encode()).hexdigest()[:16]


def leg(folder: Path, name: str, world: int, workers: int, begin: int, end: int, kill_after: float | None) -> None:
    """Run all ranks, perhaps killed."""
    (folder / name).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--train", str(folder), name]
    ranks = [
        subprocess.Popen([*command, *map(str, (rank, world, workers, begin, end))], stdout=subprocess.DEVNULL)
        for rank in range(world)
    ]
    if kill_after is not None:
        logs = [folder / name / f"rank{rank}.log" for rank in range(world)]
        while not all(log.exists() and log.read_text().count("\n") > 4 for log in logs):
            time.sleep(0.05)
            if any(rank.poll() is not None for rank in ranks):
                break
        time.sleep(kill_after)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        if rank.wait() not in (0, -signal.SIGKILL):
            sys.exit(f"a rank ended with {rank.returncode}")


def resumed(folder: Path, before: str, after: str, world: int, next_world: int) -> int:
    """Put the newest whole state of a leg where the next one looks for it; returns its slot, 0 without one."""
    for checkpoint in sorted((folder / before).glob("iter_*"), reverse=True):
        files = [checkpoint / f"train_dataloader_dprank{rank:03d}.pt" for rank in range(world)]
        slot = int(checkpoint.name.removeprefix("iter_"))
        if all(file.exists() for file in files):
            state = sp.merge_states([torch.load(file)["dataloader_state_dict"] for file in files])
            for rank in range(next_world):
                save(folder / after / checkpoint.name, rank, state)
            return slot
    return 0


def lines(folder: Path) -> dict[int, set[str]]:
    """The hashes that were given for each slot."""
    found: dict[int, set[str]] = {}
    for log in folder.glob("*.log"):
        for line in log.read_text().splitlines():
            if len(line.split()) == 2 and len(line.split()[1]) == 16:
                found.setdefault(int(line.split()[0]), set()).add(line.split()[1])
    return found


def main() -> None:
    """Compare some killed runs with one that never stops."""
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
        os._exit(0)  # as a trainer that ends without closing its loader
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(folder)
        leg(folder, "whole", 1, 0, 0, options.iterations, None)
        expected = lines(folder / "whole")
        for run in range(options.runs):
            draw, world, slot, kills = random.Random(run), 1, 0, 0
            name = f"run{run}-0"
            while slot < options.iterations:
                last = kills == 2
                workers, kill_after = draw.choice([0, 1, 2]), None if last else draw.random()
                leg(folder, name, world, workers, slot, options.iterations, kill_after)
                found = lines(folder / name)
                wrong = [at for at, hashes in found.items() if hashes != expected.get(at, hashes)]
                if wrong:
                    sys.exit(f"run {run}, leg {kills}: slot {wrong[0]} differs")
                if last:
                    break
                kills, previous, before = kills + 1, name, world
                name, world = f"run{run}-{kills}", draw.choice([1, 2])
                slot = resumed(folder, previous, name, before, world)
            print(f"run {run}: {kills} kills, exact")


if __name__ == "__main__":
    main()

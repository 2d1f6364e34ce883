"""Kill and resume Megatron-LM's data provider, with one changed import, on other workers and ranks.

    python tools/trials/energon_provider.py [--runs 3] [--iterations 24]

Each data-parallel rank is a process that reads batches from the provider's loader, as Megatron does. Every few
iterations it writes `save_state` to the file that the provider reads. All ranks are killed by SIGKILL at a random
moment. The next segment of the run has other workers and sometimes other ranks, which load the merged states. Every
slot must have the same batch as in an uninterrupted run.
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

SAVE_EVERY = 3  # iterations
YAML = """sample_type: {__module__: megatron.energon, __class__: VQASample}
field_map: {image: png, context: 'json[q]', answers: 'json[a]'}
subflavors: {is_llava_training: true, augmentation: true}
"""


def write_dataset(folder: Path) -> None:
    """Write a dataset with the splits that the provider reads."""
    rng = random.Random(1)
    with sp.ShardWriter(folder / "data", max_samples=30) as writer:
        for number in range(240):
            buffer = io.BytesIO()
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(buffer, "png")
            text = "".join(rng.choices("abcdef ", k=rng.randint(3, 60)))
            writer.write({"__key__": f"{number:04d}", "png": buffer.getvalue(), "json": {"q": "?", "a": text}})
    names = [f"{number:06d}.tar" for number in range(8)]
    (folder / "data/.nv-meta/split.yaml").write_text(
        json.dumps({"split_parts": {"train": names[:7], "val": names[7:]}})
    )
    (folder / "data/.nv-meta/dataset.yaml").write_text(YAML)
    (folder / "prompts.json").write_text("{}")


def train(folder: Path, name: str, rank: int, world: int, workers: int, begin: int, end: int) -> None:
    """Run one rank of a segment. It logs `slot hash` for each batch, and saves every few iterations.

    Args:
        folder: The folder of the trial.
        name: The name of the segment, and of its folder.
        rank: The rank.
        world: The number of ranks.
        workers: The number of worker processes.
        begin: The first slot.
        end: The slot before which to stop.
    """
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
            if slot % SAVE_EVERY == 0:
                [next(each) for each in valid]
                save_state(folder / name / f"iter_{slot:07d}", rank, loader.save_state())


def save_state(folder: Path, rank: int, state: Any) -> None:
    """Write a rank's state to the file of Megatron."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"train_dataloader_dprank{rank:03d}.pt"
    torch.save({"dataloader_state_dict": state}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def digest(batch: dict[str, Any]) -> str:
    """Return a hash of all bits of a batch."""
    fields = [(name, value) for name, value in batch.items() if name != "__sources__"]
    raw = [(name, value.numpy().tobytes() if hasattr(value, "numpy") else value) for name, value in fields]
    return hashlib.sha256(repr(raw).encode()).hexdigest()[:16]


def run_segment(folder: Path, name: str, world: int, workers: int, begin: int, end: int, kill_s: float | None) -> None:
    """Run all ranks of a segment. Kill them `kill_s` seconds after their first batches, unless it is None."""
    (folder / name).mkdir(exist_ok=True)
    command = [sys.executable, __file__, "--train", str(folder), name]
    ranks = [
        subprocess.Popen([*command, *map(str, (rank, world, workers, begin, end))], stdout=subprocess.DEVNULL)
        for rank in range(world)
    ]
    if kill_s is not None:
        logs = [folder / name / f"rank{rank}.log" for rank in range(world)]
        while not all(log.exists() and log.read_text().count("\n") > 4 for log in logs):
            time.sleep(0.05)
            if any(rank.poll() is not None for rank in ranks):
                break
        time.sleep(kill_s)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    for rank in ranks:
        if rank.wait() not in (0, -signal.SIGKILL):
            sys.exit(f"a rank ended with {rank.returncode}")


def copy_newest_state(folder: Path, before: str, after: str, world: int, next_world: int) -> int:
    """Copy the newest complete state of a segment to the next one. Return its slot, or 0 without a state."""
    for checkpoint in sorted((folder / before).glob("iter_*"), reverse=True):
        files = [checkpoint / f"train_dataloader_dprank{rank:03d}.pt" for rank in range(world)]
        slot = int(checkpoint.name.removeprefix("iter_"))
        if all(file.exists() for file in files):
            state = sp.merge_states([torch.load(file)["dataloader_state_dict"] for file in files])
            for rank in range(next_world):
                save_state(folder / after / checkpoint.name, rank, state)
            return slot
    return 0


def hashes_by_slot(folder: Path) -> dict[int, set[str]]:
    """Read the hashes that a segment has logged, by slot."""
    hashes: dict[int, set[str]] = {}
    for log in folder.glob("*.log"):
        for slot, _, hashed in (line.partition(" ") for line in log.read_text().splitlines()):
            if len(hashed) == 16:  # otherwise the line is incomplete
                hashes.setdefault(int(slot), set()).add(hashed)
    return hashes


def main() -> None:
    """Compare runs that are killed with an uninterrupted one."""
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
        os._exit(0)  # exits like a trainer that does not close its loader
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_dataset(folder)
        run_segment(folder, "whole", 1, 0, 0, options.iterations, None)
        expected = hashes_by_slot(folder / "whole")
        for run in range(options.runs):
            rng, world, slot, kills = random.Random(run), 1, 0, 0
            name = f"run{run}-0"
            while slot < options.iterations:
                last = kills == 2
                workers, kill_s = rng.choice([0, 1, 2]), None if last else rng.random()
                run_segment(folder, name, world, workers, slot, options.iterations, kill_s)
                found = hashes_by_slot(folder / name)
                wrong = [at for at, hashes in found.items() if hashes != expected.get(at, hashes)]
                if wrong:
                    sys.exit(f"run {run}, segment {kills}: slot {wrong[0]} differs")
                if last:
                    break
                kills, previous, before = kills + 1, name, world
                name, world = f"run{run}-{kills}", rng.choice([1, 2])
                slot = copy_newest_state(folder, previous, name, before, world)
            print(f"run {run}: {kills} kills, exact")


if __name__ == "__main__":
    main()

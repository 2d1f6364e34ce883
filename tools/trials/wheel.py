"""Test the wheel in new environments without the rest of the project.

    python tools/trials/wheel.py 3.11 3.12 3.13

For each Python, it installs the wheel and its dependencies, and converts 200 captioned images with `savable convert`.
An uninterrupted run takes 20 steps with two workers. An interrupted run takes 9 steps, saves, and resumes in another
process without workers. Their batches must have the same hashes.

With --oldest, the dependencies are the oldest that pyproject.toml allows. It needs `uv`, the network on the first run,
and a minute per Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVED, IMAGES = 20, 9, 200


def main() -> int:
    """Check the wheel with each Python, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=["3.11", "3.12", "3.13"], help="versions, or interpreters")
    parser.add_argument("--oldest", action="store_true", help="the oldest dependencies that are allowed")
    arguments = parser.parse_args()
    uv = shutil.which("uv")
    if uv is None:
        parser.error("uv is not installed: pip install uv")
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run(uv, "build", "--quiet", "--wheel", "--out-dir", folder / "wheel", ROOT)
        wheel = next((folder / "wheel").glob("*.whl"))
        for number, python in enumerate(arguments.pythons):
            oldest = ["--resolution", "lowest-direct", "-r", ROOT / "pyproject.toml"] if arguments.oldest else []
            try:
                print(f"{python}: {_check_wheel(uv, python, wheel, folder / str(number), oldest)}", flush=True)
            except subprocess.CalledProcessError as error:
                failed += 1
                print(f"{python}: failed: {error.cmd}\n{error.stderr}", flush=True)
            shutil.rmtree(folder / str(number), ignore_errors=True)
    return int(failed > 0)


def _check_wheel(uv: str, python: str, wheel: Path, folder: Path, oldest: list[object]) -> str:
    """Install the wheel and compare both runs. Returns a sentence about the result."""
    _run(uv, "venv", "--quiet", "--python", python, folder / "env")
    env_python = folder / "env/bin/python"
    if oldest:
        _run(uv, "pip", "install", "--quiet", "--python", env_python, *oldest)
    _run(uv, "pip", "install", "--quiet", "--python", env_python, wheel)
    (folder / "files").mkdir()
    _run(env_python, __file__, "--images", folder / "files")
    _run(folder / "env/bin/savable", "convert", folder / "files", folder / "shards", "--shard-samples", "50")
    train = [env_python, __file__, "--train", folder / "shards"]
    _run(*train, folder / "uninterrupted.json", "0", STEPS, "2")
    _run(*train, folder / "interrupted.json", "0", SAVED, "2")
    _run(*train, folder / "interrupted.json", SAVED, STEPS, "0")
    runs = [json.loads((folder / f"{name}.json").read_text()) for name in ("uninterrupted", "interrupted")]
    if runs[0] != runs[1] or len(runs[0]) != STEPS:
        raise subprocess.CalledProcessError(1, "compare", stderr=f"other batches:\n{runs[0]}\n{runs[1]}")
    version = _run(folder / "env/bin/savable", "--version").strip()
    packages = json.loads(_run(uv, "pip", "list", "--quiet", "--python", env_python, "--format", "json"))
    shown = [f"{each['name']} {each['version']}" for each in packages if each["name"] in ("numpy", "torch", "pillow")]
    python_version = _run(env_python, "-V").strip()
    return f"{version} on {python_version} with {', '.join(shown)}: {STEPS} equal batches"


def _run(*command: object) -> str:
    """Run a command that cannot import another copy of the project, and return its output."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    arguments = [str(argument) for argument in command]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, env=clean, cwd="/").stdout


def write_images(folder: Path) -> None:
    """Write images of different sizes, each with its own caption."""
    from PIL import Image

    for number in range(IMAGES):
        image = Image.linear_gradient("L").resize((40 + number % 7, 40 + number % 5)).rotate(number)
        Image.merge("RGB", (image, image, image)).save(folder / f"{number:04d}.jpg")
        (folder / f"{number:04d}.txt").write_text(f"a gradient, turned by {number} degrees")


def train(shards: str, log: Path, first: int, last: int) -> Iterator[str]:
    """Yield the hashes of the batches from step `first` on. Save the state next to the log before step `last`."""
    import torch

    import savable_pipeline as sp
    from savable_pipeline import custom
    from task_encoders import CaptioningEncoder

    assert ROOT not in Path(sp.__file__).parents, f"{sp.__file__} is not the wheel's"
    encoder = CaptioningEncoder(image_size=32)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=50)
        return sp.Batcher(sp.OnlinePacker(sp.Encode(samples, encoder), max_length=256), size=2)

    state = log.with_suffix(".pt")
    with sp.SavableLoader(pipeline, seed=7, lanes=4, num_workers=int(sys.argv[6]), ranks=(0, 1)) as loader:
        if first:
            loader.load_state_dict(torch.load(state, weights_only=True))
        for step, batch in enumerate(loader, start=first):
            yield _hash(batch)
            if step + 1 == last:
                torch.save(loader.state_dict(), state)
                return


def _hash(batch: dict[str, Any]) -> str:
    """Return a hash of the names and all bits of a batch's fields."""
    digest = hashlib.sha256()
    for name, value in sorted(batch.items()):
        digest.update(name.encode())
        digest.update(value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--images"]:
        write_images(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--train"]:
        log = Path(sys.argv[3])
        before = json.loads(log.read_text()) if log.exists() else []
        log.write_text(json.dumps(before + list(train(sys.argv[2], log, int(sys.argv[4]), int(sys.argv[5])))))
    else:
        sys.exit(main())

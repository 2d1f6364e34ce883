"""Small folders and JSONL files to convert, and the contents of shards."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from savable_pipeline.tools.convert import REJECTED, Options

SMALL = Options(shard_samples=3)


def jpeg(shade: int, side: int = 8) -> bytes:
    buffer = io.BytesIO()
    gradient = Image.linear_gradient("L").resize((side, side))
    Image.merge("RGB", (gradient, gradient, Image.new("L", (side, side), shade))).save(buffer, "JPEG")
    return buffer.getvalue()


def write_captioned_images(folder: Path, count: int, **extra: bytes) -> Path:
    """Write `count` captioned images, two thirds of them in nested folders, and more files by path."""
    files = {f"{('', 'b/', 'b/c.d/')[i % 3]}{i:03d}.jpg": jpeg(i % 256) for i in range(count)}
    files |= {name.replace(".jpg", ".txt"): f"caption of {name}".encode() for name in files}
    for name, content in (files | extra).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the hash of every file, hidden ones too."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def tar_files(folder: Path) -> dict[str, bytes]:
    """Return the members of all shards in order, read by Python's own tarfile."""
    files = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            files |= {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    return files


def write_lines(path: Path, *objects: Any) -> Path:
    lines = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in objects]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def reject_reasons(folder: Path) -> dict[str, str]:
    """Return the reason for each rejected file or line, from the file in the target."""
    rejects = map(json.loads, (folder / REJECTED).read_text().splitlines())
    return {reject["file"]: reject["reason"] for reject in rejects}

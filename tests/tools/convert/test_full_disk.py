"""A disk that fills at any moment of a conversion, for every kind of source: a real one, where a user may mount it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from savable_pipeline.errors import SavableError
from tests.support.toy_files import file_hashes
from tests.support.toy_sources import SOURCES, convert_in_halves

ALONE = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-m", __name__]
_STEP = 12_288  # bytes: so much larger is the disk at each attempt


def convert_on_small_disks(kind: str, folder: Path) -> tuple[int, int]:
    """Convert onto a disk that is a little larger each time; and go on where the larger one has what was done.

    Gives the number of disks that were too small, and that of those on which finished shards were kept.
    """
    source = SOURCES[kind](folder / "in", 12)
    convert_in_halves(source, folder / "calm", workers=1)
    calm, disk, kept = file_hashes(folder / "calm"), folder / "disk", 0
    disk.mkdir()
    for attempt in range(1, 60):
        # Grown in place every time but the fourth, which starts on an empty one.
        again = attempt % 4 and attempt > 1
        mount("-o", f"{'remount,' if again else ''}size={attempt * _STEP}", disk)
        shards = {path.name for path in (disk / "out").glob("*.tar")}
        try:
            convert_in_halves(source, disk / "out", workers=1)
        except SavableError as error:
            assert "disk or quota is full" in str(error) and "start again to continue" in str(error), error
            assert shards <= {path.name for path in (disk / "out").glob("*.tar")}, "a shard that was finished is gone"
            kept += bool(shards)
        else:
            assert file_hashes(disk / "out") == calm
            return attempt - 1, kept
    raise AssertionError("it never had room enough")


def mount(option: str, value: str, disk: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", option, value, "tmpfs", str(disk)], check=True)


def may_mount(folder: Path) -> bool:
    command = [*ALONE[:4], "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", SOURCES)
def test_full_disk_at_any_moment_is_a_clear_error(tmp_path: Path, kind: str) -> None:
    if not may_mount(tmp_path):
        pytest.skip("no disk may be mounted here, not even in a name space of its own")
    done = subprocess.run([*ALONE, kind, str(tmp_path)], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr
    small, kept = map(int, done.stdout.split())
    assert small > 3 and kept > 0
    print(f"{kind}: {small} disks were full, {kept} of them with shards that were finished before")


if __name__ == "__main__":
    print(*convert_on_small_disks(sys.argv[1], Path(sys.argv[2])))

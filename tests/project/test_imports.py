"""What importing the library costs: who only reads samples loads neither torch nor Pillow."""

from __future__ import annotations

import subprocess
import sys

import savable_pipeline


def test_a_reader_is_imported_without_torch_and_pillow() -> None:
    program = "import sys, savable_pipeline as sp; sp.TarShardReader; print({'torch', 'PIL'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_has_its_place() -> None:
    assert set(savable_pipeline.__all__) == set(savable_pipeline._PLACES)
    assert all(hasattr(savable_pipeline, name) for name in savable_pipeline.__all__)

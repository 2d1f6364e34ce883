"""`task_encoders`: every public name is there, and importing the package is quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import task_encoders
from savable_pipeline import TaskEncoder
from task_encoders.parts import token_packing


@pytest.mark.parametrize("name", [name for name in task_encoders.__all__ if name != "IGNORED"])
def test_a_public_name_is_the_class_of_that_name(name: str) -> None:
    found = getattr(task_encoders, name)
    assert isinstance(found, type) and found.__name__ == name
    assert found.__module__.startswith("task_encoders.")


def test_ignored_label_equals_that_of_packs() -> None:
    assert task_encoders.IGNORED == token_packing.IGNORED == -100


def test_every_encoder_is_public() -> None:
    for file in ("captioning", "chat", "classification", "contrastive", "interleaved", "language_modeling", "speech"):
        __import__(f"task_encoders.{file}")
    own = {found for found in _subclasses(TaskEncoder) if found.__module__.startswith("task_encoders.")}
    assert {found.__name__ for found in own} - {"MixedEncoder"} <= set(task_encoders.__all__)
    assert len(own) >= 7


def _subclasses(base: type) -> set[type]:
    return {base}.union(*map(_subclasses, base.__subclasses__()))


def test_public_names_are_sorted_and_are_all_that_dir_lists() -> None:
    assert sorted(task_encoders.__all__) == task_encoders.__all__ == dir(task_encoders)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = task_encoders.Nothing


HEAVY = {"torch", "torchvision", "torch._dynamo", "transformers", "tokenizers", "pyarrow", "PIL", "numpy"}


def test_importing_the_package_is_light_and_an_encoder_imports_little_but_torch() -> None:
    code = (
        f"import sys, task_encoders; print(sorted({HEAVY} & {{*sys.modules}}))\n"
        f"for name in task_encoders.__all__: getattr(task_encoders, name)\n"
        f"from savable_pipeline import StatefulDataset\n"
        f"import savable_pipeline.trainers.model_inputs\n"
        f"print(sorted({HEAVY} & {{*sys.modules}}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["[]", "['PIL', 'numpy', 'torch']"]


def test_public_names_can_be_imported_from_the_package() -> None:
    from task_encoders import ChatEncoder, NativeSize, Vision

    assert [found.__name__ for found in (ChatEncoder, NativeSize, Vision)] == ["ChatEncoder", "NativeSize", "Vision"]

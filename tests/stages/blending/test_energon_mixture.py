"""A metadataset of Megatron-Energon is the mixture that it describes, or is refused with the line."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.blending.mixture import Mixture, MixtureSource
from savable_pipeline.testing import assert_exact_resume

HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.fixture
def write(tmp_path: Path, make_shards: Any) -> Any:
    """Writes a metadataset beside three prepared datasets of 10, 20 and 30 samples, the last tenth of each in `val`."""
    for name, size in [("a", 1), ("b", 2), ("c", 3)]:
        folder = make_shards([9 * size, size], folder=f"data/{name}", of=name)
        (folder / ".nv-meta").mkdir()
        splits = {"split_parts": {"train": ["0000.tar"], "val": ["0001.tar"]}}
        (folder / ".nv-meta/split.yaml").write_text(json.dumps(splits))

    def write(text: str, name: str = "metadataset.yaml") -> Path:
        path = tmp_path / name
        path.write_text(dedent(text).lstrip())
        return path

    return write


def of_each(mixture: Mixture, n: int) -> Counter[str]:
    samples = mixture.samples(sp.Lane(), block_size=1)
    return Counter(sample.json()["of"] for sample, _ in zip(samples, range(n), strict=False))


def test_a_blend_of_version_2_has_its_weights_splits_and_subflavors(write: Any) -> None:
    path = write(
        HEAD
        + """
splits:
  train:
    blend:
      - {path: ./data/a, weight: 5, subflavors: {kind: photo}}
      - {path: data/b, split_part: val}
      - path: data/b
        weight: 0.0
  val:
    path: ./data/c
"""
    )
    mixture = custom.read_mixture(path, split="train")
    folder = path.parent / "data"
    assert mixture.sources == {
        "a": MixtureSource(str(folder / "a"), weight=5, split="train", tags={"kind": "photo"}),
        "b": MixtureSource(str(folder / "b"), weight=1, split="val"),
        "b-2": MixtureSource(str(folder / "b"), weight=0.0, split="train"),
    }
    assert mixture.tags()["a"] == {"kind": "photo"}
    assert of_each(mixture, 600) == {"a": 500, "b": 100}
    val = custom.read_mixture(path, split="val")
    assert val.sources == {"c": MixtureSource(str(folder / "c"), split="val")}
    assert of_each(val, 10) == {"c": 10}


def test_version_1_is_what_a_file_without_a_class_is(write: Any) -> None:
    path = write(
        """
        splits:
          train:
            datasets:
              - {path: data/a, weight: 3, subflavor: old, split_config: split.yaml}
              - {path: data/c, shuffle_over_epochs_multiplier: -1}
        """
    )
    mixture = custom.read_mixture(path, split="train")
    assert mixture.tags() == {"a": {"__subflavor__": "old"}, "c": {}}
    assert of_each(mixture, 400) == {"a": 300, "c": 100}


def test_a_metadataset_in_another_keeps_its_shares_and_the_outer_tags_win(write: Any) -> None:
    inner = "splits: {val: {blend: [{path: data/a, weight: 3, subflavors: {x: 1, y: 1}}, {path: data/b}]}}"
    write(HEAD + inner, "inner.yaml")
    path = write(
        HEAD
        + """
splits:
  train:
    blend:
      - {path: inner.yaml, split_part: val, weight: 1, subflavors: {x: 2}}
      - {path: data/c, weight: 1}
"""
    )
    mixture = custom.read_mixture(path, split="train")
    assert mixture.tags() == {"inner/a": {"x": 2, "y": 1}, "inner/b": {"x": 2}, "c": {}}
    assert of_each(mixture, 800) == {"a": 300, "b": 100, "c": 400}


def test_blend_epochized_gives_repetitions_which_multiply_and_end(write: Any) -> None:
    write(HEAD + "splits: {train: {blend_epochized: [{path: data/a, repetitions: 0.5}, {path: data/b}]}}", "in.yaml")
    path = write(
        HEAD
        + """
splits:
  train:
    blend_epochized:
      - {path: in.yaml, repetitions: 3}
      - {path: data/c, repetitions: 0}
      - {path: data/a, repetitions: 2, split_part: val}
"""
    )
    mixture = custom.read_mixture(path, split="train")
    assert {name: getattr(each, "repetitions", None) for name, each in mixture.sources.items()} == {
        "in.a": 1.5,
        "in.b": 3,
        "c": 0,
        "a": 2,
    }
    assert of_each(mixture, 1000) == {"a": 13 + 2, "b": 54}
    assert_exact_resume(partial(numbers, mixture), lanes=2, steps=6, chains=0, after=1)


def numbers(mixture: Mixture, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(mixture.samples(lane), Numbers()), size=2)


class Numbers(sp.TaskEncoder):
    """Where a sample is from, and its number."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["of"], sample.json()["id"], rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


BLEND = HEAD + "splits:\n  train:\n    blend:\n    - path: data/a\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (BLEND + "      subset: {range: [0%, 50%]}", 7, "`subset`: a range of consecutive samples there"),
        (BLEND + "      aux: {pixels: data/b}", 7, "`aux`: there is no auxiliary data here"),
        (BLEND + "      dataset_config: other.yaml", 7, "`dataset_config: other.yaml` is not kept"),
        (BLEND + "      shuffle_over_epochs_multiplier: 0", 7, "all sources are shuffled, or none"),
        (BLEND + "      shuffle_over_epochs_multiplier: null", 7, "all sources are shuffled, or none"),
        (BLEND + "      repetitions: 2", 7, "`repetitions` is not known here"),
        (BLEND + "      weight: -1", 7, "must be at least 0, not -1"),
        (BLEND + "      weight: high", 7, "`weight` is a number, not 'high'"),
        (BLEND + "      weight: 0", 5, "every `weight` is 0"),
        (BLEND + "      subflavors: photo", 7, "`subflavors` is a mapping"),
        (BLEND + "      split_part: 3", 7, "`split_part` is a name"),
        (BLEND + "    - join: [{path: data/b}]\n      joiner: x", 7, "`join`: datasets are not joined here"),
        (BLEND + "    - weight: 3", 7, "a dataset has a `path`"),
        (BLEND + "    - path: msc://b/a", 7, "name the bucket by its own URL"),
        (BLEND + "    - path: s3://b/a.yaml", 7, "a metadataset behind a URL is not read"),
        (BLEND + "    - path: data/a/0000.tar", 7, "is a file, not a folder of shards"),
        (BLEND + "    - path: gone.yaml", 7, "No such file"),
        (BLEND + "    - path: metadataset.yaml", 7, "a metadataset inside itself"),
        (BLEND + "    - path: epochized.yaml", 7, "one of the two has weights and the other repetitions"),
        (BLEND + "    subset: {range: [0, 5]}", 7, "`subset`"),
        (HEAD + "splits:\n  train: {blend: []}", 4, "is a list of one mapping at least"),
        (HEAD + "splits:\n  val: {path: data/a}", 3, "there is no split 'train'; it has val"),
        (HEAD + "split: {}", 3, "`split` is not known of a metadataset"),
        (HEAD, 1, "a metadataset has `splits`"),
        ("__class__: CrudeWebdataset\nsplits: {}", 1, "CrudeWebdataset is not read"),
        ("__module__: os\n__class__: system\nsplits: {}", 2, "os.system is not read"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_its_line(write: Any, text: str, line: int, what: str) -> None:
    write(HEAD + "splits: {train: {blend_epochized: [{path: data/b}]}}", "epochized.yaml")
    path = write(text)
    with pytest.raises(ValueError) as caught:
        custom.read_mixture(path, split="train")
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert what in str(caught.value)


def test_a_split_is_asked_for_where_there_are_splits_and_only_there(write: Any) -> None:
    with pytest.raises(ValueError, match=r"line 3: a metadataset is read one split at a time: give split=, one of"):
        custom.read_mixture(write(BLEND))
    own = write("sources: {a: {path: data/a, weight: 1}}", "own.yaml")
    with pytest.raises(ValueError, match="split='train' is for a metadataset"):
        custom.read_mixture(own, split="train")

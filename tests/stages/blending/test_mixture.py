"""`mixture.yaml`, or a metadataset of Megatron-Energon: what it says is blended, and its faults are named by line."""

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
from savable_pipeline.stages.blending.mixture import MixtureSource
from savable_pipeline.testing import assert_exact_resume
from tests.support.toy_server import serving


@pytest.fixture
def write(tmp_path: Path, make_shards: Any) -> Any:
    """Write a mixture beside three datasets of 10, 20 and 30 samples."""
    for name, size in [("a", 10), ("b", 20), ("c", 30)]:
        make_shards([size], folder=name, of=name)

    def write(text: str) -> Path:
        path = tmp_path / "mixture.yaml"
        path.write_text(dedent(text).lstrip())
        return path

    return write


def of_each(stage: custom.Stage, n: int) -> Counter[str]:
    """Which datasets the first `n` samples are of."""
    return Counter(sample.json()["of"] for sample, _ in zip(stage, range(n), strict=False))


def test_sources_are_weighted_and_mixtures_nest(write: Any) -> None:
    path = write(
        """
        sources:
          first: {path: a, weight: 0.5}
          rest:
            weight: 0.5
            sources:
              b: {path: b, weight: 3}
              c: {path: [c/0000.tar], weight: 1}
        """
    )
    mixture = custom.read_mixture(path)
    assert mixture.sources["first"] == MixtureSource(path=str(path.parent / "a"), weight=0.5)
    assert of_each(mixture.samples(sp.Lane()), 800) == {"a": 400, "b": 300, "c": 100}


SCHEDULED = """
sources:
  a: {path: a}
  rest:
    schedule: {points: [{at: 0, weights: {b: 1}}, {at: 20, weights: {b: 1, c: 1/2}}]}
    sources: {b: {path: b}, c: {path: c}}
schedule:
  shape: linear
  points:
    - {at: 0, weights: {a: 1}}
    - {at: 40, weights: {rest: 1}}
"""


def test_schedule_in_a_file_equals_one_in_python(write: Any) -> None:
    path = write(SCHEDULED)

    def by_hand(lane: sp.Lane) -> sp.Blend:
        a, b, c = (sp.TarShardReader(path.parent / name, lane) for name in "abc")
        inner = sp.Blend({"b": b, "c": c}, weights=sp.Schedule([(0, {"b": 1}), (20, {"b": 2, "c": 1})]))
        outer = sp.Schedule([(0, {"a": 1}), (40, {"rest": 1})], shape="linear")
        return sp.Blend({"a": a, "rest": inner}, weights=outer)

    found = [
        sample.key for sample, _ in zip(custom.read_mixture(path).samples(sp.Lane(seed=2)), range(120), strict=False)
    ]
    assert found == [sample.key for sample, _ in zip(by_hand(sp.Lane(seed=2)), range(120), strict=False)]
    assert of_each(custom.read_mixture(path).samples(sp.Lane(seed=2)), 100) == {"a": 20, "b": 60, "c": 20}


def test_scheduled_mixture_resumes_exactly_during_a_change(write: Any) -> None:
    pipeline = partial(batches_of, write(SCHEDULED))
    assert_exact_resume(pipeline, lanes=2, steps=14, world_sizes=(1, 2), chains=1, after=1)  # it ends at the tenth


def batches_of(path: Path, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(custom.read_mixture(path).samples(lane), Ids()), size=2)


class Ids(sp.TaskEncoder):
    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["of"] + sample.key[-2:]


def test_sources_with_repetitions_end_at_about_the_same_time(write: Any) -> None:
    mixture = custom.read_mixture(
        write(
            """
            sources:
              a: {path: a, repetitions: 3}
              b: {path: b, repetitions: 1}
            """
        )
    )
    stage = mixture.samples(sp.Lane(), block_size=1)
    assert of_each(stage, 25) in ({"a": 15, "b": 10}, {"a": 14, "b": 11}, {"a": 16, "b": 9})
    assert of_each(mixture.samples(sp.Lane()), 1000) == {"a": 30, "b": 20}


def test_repetitions_may_be_a_fraction_or_0(write: Any) -> None:
    path = write(
        "sources: {a: {path: a, repetitions: 2.5}, b: {path: b, repetitions: 0}, c: {path: c, repetitions: .5}}"
    )
    mixture = custom.read_mixture(path)
    stage = mixture.samples(sp.Lane(), block_size=1)
    assert isinstance(stage, sp.Blend) and stage.weights == {"a": 5, "b": 0, "c": 3}
    assert of_each(stage, 16)["a"] in (9, 10, 11)
    assert of_each(mixture.samples(sp.Lane()), 1000) == {"a": 25, "c": 15}
    assert_exact_resume(partial(numbers, mixture), lanes=2, steps=16, world_sizes=(1, 2), chains=1, after=1)


def test_mixture_without_weights_uses_sizes_and_a_source_may_be_off(write: Any) -> None:
    by_size = write("sources: {b: {path: b}, rest: {sources: {a: {path: a, weight: 0}, c: {path: c, weight: 1}}}}")
    # the nested mixture has 40 samples, of which those of `a` are off
    assert of_each(custom.read_mixture(by_size).samples(sp.Lane()), 60) == {"b": 20, "c": 40}


def test_tags_are_looked_up_by_the_sources_name(write: Any) -> None:
    path = write(
        """
        sources:
          a: {path: a, weight: 1, tags: {kind: photo}}
          rest: {weight: 1, sources: {b: {path: b, weight: 1, tags: {kind: page}}}}
        """
    )
    mixture = custom.read_mixture(path)
    assert mixture.tags() == {"a": {"kind": "photo"}, "rest/b": {"kind": "page"}}


def ids(stage: custom.Stage, n: int) -> list[tuple[str, int]]:
    """Dataset and number of the first `n` samples, sorted."""
    made = [sample.json() for sample, _ in zip(stage, range(n), strict=False)]
    return sorted((each["of"], each["id"]) for each in made)


def test_split_and_subset_choose_the_samples(write: Any, make_shards: Any) -> None:
    prepared = make_shards([4, 4, 2], folder="prepared", of="prepared")
    splits = {"split_parts": {"train": ["000{0..1}.tar"], "val": ["0002.tar"]}, "exclude": ["0001.tar/s000006"]}
    (prepared / ".nv-meta").mkdir()
    (prepared / ".nv-meta/split.yaml").write_text(json.dumps(splits))
    path = write(
        """
        sources:
          train: {path: prepared, split: train, repetitions: 1}
          val: {path: prepared, split: val, repetitions: 1}
          few: {path: c, subset: 7, repetitions: 2}
          low: {path: b, subset: [0, 0.5], repetitions: 1}
          high: {path: b, subset: [0.5, 1.0], repetitions: 1}
        """
    )
    stage = custom.read_mixture(path).samples(sp.Lane())
    assert stage.info.population == 7 + 2 + 7 + 10 + 10
    found = ids(stage, 1000)
    assert [number for name, number in found if name == "prepared"] == [0, 1, 2, 3, 4, 5, 7, 8, 9]
    assert [number for name, number in found if name == "b"] == list(range(20))  # both halves, and no sample twice
    few = Counter(number for name, number in found if name == "c")
    assert (len(few), set(few.values())) == (7, {2})
    first = next(custom.read_mixture(path).samples(sp.Lane(seed=5)))
    assert first.json()["of"] in {"prepared", "b", "c"}


def numbers(mixture: custom.Mixture, lane: sp.Lane) -> custom.Stage:
    """Batches of dataset and number."""
    samples = sp.ShuffleBuffer(mixture.samples(lane, block_size=2), size=7)
    return sp.Batcher(sp.Encode(samples, Numbers()), size=3)


class Numbers(sp.TaskEncoder):
    """The dataset and the number of a sample."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["of"], sample.json()["id"], rng.random()

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return items


def test_remote_shards_use_the_configured_cache(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVABLE_CACHE", str(tmp_path / "not here"))
    with serving(tmp_path) as server:
        path = write(f"sources: {{a: {{path: '{server.url}/a/0000.tar', weight: 1}}}}")
        stage = custom.read_mixture(path).samples(sp.Lane(), cache=tmp_path / "cache", cache_bytes=10**8)
        assert ids(stage, 10) == [("a", number) for number in range(10)]
    assert list((tmp_path / "cache").iterdir())
    assert not (tmp_path / "not here").exists()


def points(point: str, shape: str = "step") -> str:
    """A mixture of two sources with a schedule of one point, in its sixth line."""
    sources = "sources:\n  a: {path: a}\n  b: {path: b}\n"
    return f"{sources}schedule:\n  points:\n    - {point}\n  shape: {shape}"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "expected a mapping, not None"),
        ("[1, 2]", 1, "expected a mapping"),
        ("sources: {}", 1, "add `sources`"),
        ("source: {a: {path: a, weight: 1}}", 1, "unknown key 'source'"),
        ("sources:\n  a: {path: a, weight: 1}\n  b: 3", 3, "expected a mapping, not 3"),
        ("sources:\n  a:\n    path: a\n    weight: [1]", 4, "Expected `int | float | str | null`, got `array`"),
        ("sources:\n  a:\n    path: a\n    wait: 1", 4, "a source contains unknown field `wait`"),
        ("sources:\n  a:\n    path: a\n\n    weight: -1", 5, "must be at least 0, not -1"),
        ("sources:\n  a:\n    path: a\n    weight: .nan", 4, "must be a number, not nan"),
        ("sources:\n  a:\n    weight: 1", 2, "a source missing required field `path`"),
        ("sources:\n  a:\n    path: a\n  b: {path: b, weight: 1}", 2, "'a' has no `weight`, but 'b' has"),
        ("sources:\n  a: {path: a, weight: 0}", 2, "all weights are 0"),
        ("sources:\n  a: {path: a, repetitions: 0}", 2, "all weights are 0"),
        ("sources:\n  a: {path: a, repetitions: 1}\n  b: {path: b, weight: 1}", 3, "'b' has no `repetitions`"),
        ("sources:\n  a:\n    path: a\n    repetitions: -1", 4, "`repetitions` is at least 0"),
        ("sources:\n  a/b: {path: a, weight: 1}", 2, "must not contain / or #"),
        ("sources:\n  a: {path: a, weight: 1}\n  a: {path: b, weight: 1}", 3, "'a' is a repeated key, first in line 2"),
        ("sources:\n  a: {path: a, weight: 1", 2, "expected ',' or '}'"),
        ("sources:\n  a: !!python/object/apply:os.system [ls]", 2, "could not determine a constructor"),
        ("sources:\n  a: {path: a}\nschedule: 3", 3, "expected a mapping, not 3"),
        ("sources:\n  a: {path: a}\nschedule:\n  unit: tokens", 4, "unknown key 'unit'. Use `points`"),
        ("sources:\n  a: {path: a}\nschedule:\n  shape: step", 3, "add `points`"),
        ("sources:\n  a: {path: a}\nschedule:\n  points: []", 4, "`points` must be a list of mappings"),
        ("sources:\n  a: {path: a}\nschedule:\n  points:\n  - {at: 0}", 5, "a point has `at` and `weights`, not at"),
        (points("{at: 1, weights: {a: 1, b: 1}}"), 4, "the points must start at 0 and ascend, not [1]"),
        (points("{at: x, weights: {a: 1, b: 1}}"), 4, "a point must be an int of at least 0, not 'x'"),
        (points("{at: 0, weights: {a: 1, d: 1}}"), 6, "no source is called 'd'. The sources are a, b"),
        (points("{at: 0, weights: {a: 1, b: -1}}"), 6, "must be at least 0, not -1"),
        (points("{at: 0, weights: {a: 1, b: 1e99999}}"), 6, "is too large"),
        (points("{at: 0, weights: {a: 0, b: 0}}"), 4, "above 0"),
        (points("{at: 0, weights: {a: 1}}"), 4, "no point has a weight for 'b'"),
        (
            points("{at: 0, weights: {a: 1, b: 1}}").replace("}\n", ", weight: 1}\n"),
            4,
            "the schedule sets the weight of 'a'",
        ),
        (points("{at: 0, weights: {a: 1, b: 1}}", "line"), 4, "shape must be one of step, linear, not 'line'"),
    ],
)
def test_an_error_names_the_line(write: Any, text: str, line: int, what: str) -> None:
    path = write(text)
    with pytest.raises(ValueError) as caught:
        custom.read_mixture(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert what in str(caught.value)


def test_one_file_of_samples_to_exclude_is_for_all_sources(write: Any, tmp_path: Path) -> None:
    path = write("sources: {a: {path: a, repetitions: 1}, b: {path: b, repetitions: 1}}")
    (tmp_path / "forget").write_text('s000003\n{"shard": "0000.tar", "key": "s000015"}\n')
    items = list(sp.Encode(custom.read_mixture(path).samples(sp.Lane(), exclude=tmp_path / "forget"), Ids()))
    assert len(items) == 27 and not {"a03", "b03", "b15"} & set(items)


HEAD = "__module__: megatron.energon\n__class__: MetadatasetV2\n"


@pytest.fixture
def metadataset(tmp_path: Path, make_shards: Any) -> Any:
    """Write a metadataset beside three prepared datasets of 10, 20 and 30 samples, the last tenth of each in `val`."""
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


def test_a_blend_of_version_2_has_its_weights_splits_and_subflavors(metadataset: Any) -> None:
    path = metadataset(
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
    assert of_each(mixture.samples(sp.Lane(), block_size=1), 600) == {"a": 500, "b": 100}
    val = custom.read_mixture(path, split="val")
    assert val.sources == {"c": MixtureSource(str(folder / "c"), split="val")}
    assert of_each(val.samples(sp.Lane(), block_size=1), 10) == {"c": 10}


def test_file_without_a_class_has_version_1(metadataset: Any) -> None:
    path = metadataset(
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
    assert of_each(mixture.samples(sp.Lane(), block_size=1), 400) == {"a": 300, "c": 100}


def test_nested_metadataset_has_its_own_weights_and_the_outer_tags(metadataset: Any) -> None:
    inner = "splits: {val: {blend: [{path: data/a, weight: 3, subflavors: {x: 1, y: 1}}, {path: data/b}]}}"
    metadataset(HEAD + inner, "inner.yaml")
    path = metadataset(
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
    assert of_each(mixture.samples(sp.Lane(), block_size=1), 800) == {"a": 300, "b": 100, "c": 400}


def test_blend_epochized_sets_repetitions_which_multiply_and_end(metadataset: Any) -> None:
    metadataset(
        HEAD + "splits: {train: {blend_epochized: [{path: data/a, repetitions: 0.5}, {path: data/b}]}}", "in.yaml"
    )
    path = metadataset(
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
    assert of_each(mixture.samples(sp.Lane(), block_size=1), 1000) == {"a": 13 + 2, "b": 54}
    assert_exact_resume(partial(numbers, mixture), lanes=2, steps=6, chains=0, after=1)


BLEND = HEAD + "splits:\n  train:\n    blend:\n    - path: data/a\n"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        (BLEND + "      subset: {range: [0%, 50%]}", 7, "`subset`: a range of consecutive samples there"),
        (BLEND + "      aux: {pixels: data/b}", 7, "`aux`: there is no auxiliary data here"),
        (BLEND + "      dataset_config: other.yaml", 7, "`dataset_config: other.yaml` is not supported"),
        (BLEND + "      shuffle_over_epochs_multiplier: 0", 7, "which is for all sources"),
        (BLEND + "      shuffle_over_epochs_multiplier: null", 7, "which is for all sources"),
        (BLEND + "      repetitions: 2", 7, "`repetitions` is not known here"),
        (BLEND + "      weight: -1", 7, "must be at least 0, not -1"),
        (BLEND + "      weight: high", 7, "`weight` must be a number, not 'high'"),
        (BLEND + "      weight: 0", 5, "each `weight` is 0"),
        (BLEND + "      subflavors: photo", 7, "`subflavors` must be a mapping"),
        (BLEND + "      split_part: 3", 7, "`split_part` must be a name"),
        (BLEND + "    - join: [{path: data/b}]\n      joiner: x", 7, "`join`: datasets are not joined here"),
        (BLEND + "    - weight: 3", 7, "add a `path`"),
        (BLEND + "    - path: msc://b/a", 7, "use the URL of the bucket"),
        (BLEND + "    - path: s3://b/a.yaml", 7, "remote metadatasets are not supported"),
        (BLEND + "    - path: data/a/0000.tar", 7, "is a file. Name a folder of shards"),
        (BLEND + "    - path: gone.yaml", 7, "No such file"),
        (BLEND + "    - path: metadataset.yaml", 7, "includes itself"),
        (BLEND + "    - path: epochized.yaml", 7, "use weights in both"),
        (BLEND + "    subset: {range: [0, 5]}", 7, "`subset`"),
        (HEAD + "splits:\n  train: {blend: []}", 4, "must be a list of mappings"),
        (HEAD + "splits:\n  val: {path: data/a}", 3, "no split is called 'train'. Use one of val"),
        (HEAD + "split: {}", 3, "unknown key `split`"),
        (HEAD, 1, "add `splits`"),
        ("__class__: CrudeWebdataset\nsplits: {}", 1, "CrudeWebdataset is not supported"),
        ("__module__: os\n__class__: system\nsplits: {}", 2, "os.system is not supported"),
    ],
)
def test_unsupported_settings_are_rejected_with_their_line(metadataset: Any, text: str, line: int, what: str) -> None:
    metadataset(HEAD + "splits: {train: {blend_epochized: [{path: data/b}]}}", "epochized.yaml")
    path = metadataset(text)
    with pytest.raises(ValueError) as caught:
        custom.read_mixture(path, split="train")
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert what in str(caught.value)


def test_split_is_required_exactly_if_the_dataset_has_splits(metadataset: Any) -> None:
    with pytest.raises(ValueError, match=r"line 3: choose a split of the metadataset: split= one of"):
        custom.read_mixture(metadataset(BLEND))
    own = metadataset("sources: {a: {path: data/a, weight: 1}}", "own.yaml")
    with pytest.raises(ValueError, match="split='train' is for a metadataset"):
        custom.read_mixture(own, split="train")

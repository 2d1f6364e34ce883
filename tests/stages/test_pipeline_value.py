"""Pipelines as values: what a function of a lane builds by hand, in the order of the data, and nothing else."""

from __future__ import annotations

import inspect
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.stages.pipeline_value import BatchPipeline, ItemPipeline, SamplePipeline
from tests.conftest import MakeShards
from tests.support.toy_chains import toy_chain
from tests.support.toy_pipelines import toy_pipeline
from tests.support.toy_stores import READERS, WRITERS, number_of


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


KINDS: list[dict[str, Any]] = [
    {},
    {"pack": None, "buffer": None},
    {"blend": "nested", "by": "tokens", "pack": "first_fit_decreasing", "candidates": 3},
    {"blend": "samples", "weights": "step", "pack": "items"},
    {"pack": "both", "candidates": 3, "own": ("samples", "items", "batches"), "too_long": "split"},
]


@pytest.mark.parametrize("chosen", KINDS, ids=str)
def test_chain_and_function_yield_the_same_and_load_each_others_states(
    make_shards: MakeShards, chosen: dict[str, Any]
) -> None:
    shards = str(make_shards([50, 30, 7]))
    chain, function = toy_chain(shards, **chosen), partial(toy_pipeline, shards, **chosen)
    for first, second in [(chain, function), (function, chain)]:
        one, other = (sp.SavableLoader(each, seed=3, lanes=3) for each in (first, second))
        for _ in range(5):
            next(one)
        other.load_state_dict(one.state_dict())
        for _ in range(5):
            assert repr(next(one)) == repr(next(other))


@pytest.mark.parametrize("kind", READERS)
def test_files_of_each_kind_are_read_by_their_reader(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / "data", [9, 4])
    name, own = READERS[kind]
    reader = getattr(sp if name in sp.__all__ else custom, name)(str(tmp_path / "data"), sp.Lane(), epochs=1, **own)
    samples = sp.read(tmp_path / "data", **own)
    assert [number_of(sample) for sample in samples] == [number_of(sample) for sample in reader]
    assert len(samples) == 13
    assert type(samples(sp.Lane())) is type(reader)


def test_pipeline_value_opens_nothing_and_rejects_a_wrong_option_at_first_use(tmp_path: Path) -> None:
    samples = sp.read(tmp_path / "later", columns=["a"])
    WRITERS["jsonl"](tmp_path / "later", [3])
    with pytest.raises(
        ValueError, match=r"columns= does not apply to .* jsonl files, only to ArrowReader, ParquetReader"
    ):
        samples.take(1)


def test_read_has_the_options_of_all_readers_with_their_defaults() -> None:
    ours = {name: each for name, each in inspect.signature(sp.read).parameters.items() if name != "path"}
    readers = [getattr(sp if name in sp.__all__ else custom, name) for name, _ in READERS.values()]
    theirs = [each for reader in readers for each in inspect.signature(reader).parameters.values()]
    keywords = [each for each in theirs if each.kind is each.KEYWORD_ONLY]
    assert ours.keys() - {each.name for each in keywords} == {
        "format",
        "per_sample",
        "replace",
    }  # of webdataset pipelines
    assert not {each.name for each in keywords} - ours.keys()
    assert all(ours[each.name].default == each.default for each in keywords if each.name != "cache_bytes")


def test_read_accepts_a_store_or_a_function_that_opens_one() -> None:
    class Numbers(custom.RecordStore):
        address = "numbers"
        entries = [custom.ShardEntry("all", size=0, samples=5, digest=1)]  # noqa: RUF012

        def key(self, shard: int, row: int) -> str:
            return str(row)

        def extensions(self, shard: int, row: int) -> list[str]:
            return ["json"]

        def read(self, shard: int, row: int, extension: str) -> bytes:
            return str(row).encode()

    for named in (Numbers, Numbers()):
        assert sorted(sample.json() for sample in sp.read(named)) == [0, 1, 2, 3, 4]


def ident(sample: sp.Sample) -> int:
    return number_of(sample)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda read: read.pack(9), r"\.pack does not take samples. Add \.encode"),
        (lambda read: read.map(ident).map(ident), r"\.map does not take items\. Samples are encoded once"),
        (lambda read: read.map(ident).batch(2).shuffle(3), r"\.shuffle does not take batches\. Put it before \.batch"),
        (lambda read: read.shufle(3), "no attribute 'shufle'"),
    ],
)
def test_steps_in_a_wrong_order_are_an_error_at_their_line(build: Any, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        build(sp.read("nowhere"))


def test_invalid_stage_function_or_encoder_is_rejected_at_its_line() -> None:
    read = sp.read("nowhere")
    for build, message in [
        (lambda: read.then(ident), "a subclass of custom"),
        (lambda: read.map(sp.Decoded()), r"Pass an encoder to \.encode"),
        (lambda: read.map(lambda a, b, c: a), "f(sample, rng)"),
        (lambda: read.encode(sp.Decoded), "Pass an instance"),
        (lambda: read.encode(ident), r"Pass a function to \.map"),
        (lambda: sp.blend({"a": read, "b": read.map(ident)}), "all of samples or all of items"),
        (lambda: sp.blend({}), "all of samples or all of items"),
        (lambda: read.filter(lambda a, b, c: True), "takes a function"),
    ]:
        with pytest.raises(ValueError, match=message.replace("f(sample, rng)", r"f\(sample, rng\)")):
            build()


@pytest.mark.parametrize("kind", [SamplePipeline, ItemPipeline, BatchPipeline])
def test_each_step_has_the_defaults_of_its_stage(kind: type[sp.Pipeline]) -> None:
    made: dict[str, Any] = {
        "shuffle": sp.ShuffleBuffer,
        "encode": sp.Encode,
        "map": sp.Encode,
        "pack": sp.OnlinePacker,
        "balance": sp.Balance,
        "batch": sp.Batcher,
        "bucket": custom.BucketBatcher,
    }
    for name, stage in made.items():
        if (method := vars(kind).get(name)) is not None:
            ours, theirs = (inspect.signature(each).parameters for each in (method, stage))
            shared = ours.keys() & theirs.keys() - {"self", "source"}
            assert {each: ours[each].default for each in shared} == {each: theirs[each].default for each in shared}
            if kind is ItemPipeline:
                assert theirs.keys() - {"source"} <= ours.keys()


def test_iteration_ends_closes_its_files_and_does_not_change_generators(make_shards: MakeShards) -> None:
    def drawn(sample: sp.Sample) -> float:
        return random.random() + float(np.random.rand()) + float(torch.rand(1))

    pipeline = sp.read(str(make_shards([20, 5]))).shuffle(4).map(drawn).batch(4)
    assert [len(batch) for batch in pipeline] == [4] * 6 + [1]
    before, states = open_descriptors(), (random.getstate(), torch.get_rng_state())
    first = pipeline.take(3)
    assert open_descriptors() == before
    assert states[0] == random.getstate() and torch.equal(states[1], torch.get_rng_state())
    assert all(torch.equal(one, other) for one, other in zip(first, pipeline, strict=False))


def test_iterated_mixtures_and_blends_end_after_one_epoch(make_shards: MakeShards, tmp_path: Path) -> None:
    shards = str(make_shards([10]))
    (tmp_path / "mix.yaml").write_text(
        f"sources: {{a: {{path: {shards}, weight: 3}}, b: {{path: {shards}, weight: 1}}}}"
    )
    for mixed in (sp.mixture(tmp_path / "mix.yaml"), sp.blend({"a": sp.read(shards), "b": sp.read(shards)})):
        assert sorted(map(number_of, mixed)) == sorted([*range(10)] * 2)
        assert mixed(sp.Lane()).info.endless


def test_scheduled_pipeline_is_endless_and_can_be_inspected(make_shards: MakeShards, tmp_path: Path) -> None:
    shards = str(make_shards([10]))
    points = "[{at: 0, weights: {a: 1, b: 0}}, {at: 4, weights: {a: 0, b: 1}}]"
    sources = f"{{a: {{path: {shards}}}, b: {{path: {shards}}}}}"
    (tmp_path / "mix.yaml").write_text(f"schedule: {{points: {points}}}\nsources: {sources}")
    schedule = sp.Schedule([(0, {"a": 1, "b": 0}), (4, {"a": 0, "b": 1})])
    blended = sp.blend({"a": sp.read(shards), "b": sp.read(shards)}, weights=schedule)
    for mixed in (sp.mixture(tmp_path / "mix.yaml"), blended):
        given = [sample.source for sample in mixed.take(30)]
        assert len(given) == 30 and sorted(given[:8]) == [*"aaaabbbb"] and given[8:] == ["b"] * 22


def test_length_of_an_epoch_is_known_if_nothing_can_be_dropped(make_shards: MakeShards) -> None:
    read = sp.read(str(make_shards([10, 3])))
    assert len(read) == 13
    assert len(read.map(ident, one_to_one=True).batch(4)) == 4
    assert len(sp.read(str(make_shards([10, 3])), epochs=2)) == 26
    with pytest.raises(TypeError, match="is not known"):
        len(read.map(ident))
    assert read.map(ident)  # and yet true


def test_iteration_does_not_yield_excluded_samples(make_shards: MakeShards, tmp_path: Path) -> None:
    (tmp_path / "gone").write_text("s000003\n")
    read = sp.read(str(make_shards([6])), exclude=str(tmp_path / "gone"))
    assert sorted(map(number_of, read)) == [0, 1, 2, 4, 5]
    assert sorted(read.map(ident)) == [0, 1, 2, 4, 5]


def made_encoder() -> sp.TaskEncoder:
    return sp.Decoded()


def test_a_value_is_immutable_pickles_and_runs_in_spawned_workers(make_shards: MakeShards) -> None:
    pipeline = sp.read(str(make_shards([30])), epochs=1).shuffle(8).encode(made_encoder).batch(5)
    with pytest.raises(AttributeError):
        pipeline.step = None  # type: ignore[misc, assignment]
    assert repr(pickle.loads(pickle.dumps(pipeline))) == repr(pipeline)
    own = [batch["__key__"] for batch in sp.SavableLoader(pipeline, seed=1, lanes=2)]
    spawned = sp.Workers(start_method="spawn")
    with sp.SavableLoader(pipeline, seed=1, lanes=2, num_workers=1, workers=spawned) as loader:
        assert [batch["__key__"] for batch in loader] == own


def test_pipeline_prints_as_the_tree_of_its_stages() -> None:
    web = sp.read("web/", shuffle=False).filter(ident).map(partial(ident))
    books = sp.read(["a.tar", "b.tar"]).encode(made_encoder)
    mixed = sp.blend({"web": web, "books": books}, weights={"web": 3, "books": 1})
    assert repr(mixed.batch(4, drop_last=True)) == "\n".join(
        [
            "└─ Batcher(size=4, drop_last=True)",
            "   └─ Blend(weights={'web': 3, 'books': 1})",
            "      └─ web: Encode(ident)",
            "         └─ Filter(ident)",
            "            └─ read('web/', shuffle=False)",
            "      └─ books: Encode(made_encoder)",
            "         └─ read(('a.tar', 'b.tar'))",
        ]
    )

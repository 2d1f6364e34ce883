"""Stages of a user's own, written from the docstring of `Stage` alone."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import savable_pipeline as sp
from savable_pipeline import custom, stages
from savable_pipeline.stages.item_ref import Element
from savable_pipeline.testing import assert_exact_resume
from tests.support.toy_faults import NumberEncoder


class Lengths(NumberEncoder):
    """Items are lists of their number, 1 to 7 long; packs are lists of them."""

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        number = sample.json()["id"]
        return [number] * (1 + number % 7)

    def length(self, item: Any) -> int:
        return len(item)

    def pack(self, items: list[Any], rng: sp.Rng) -> Any:
        return [number for item in items for number in item]


class EveryThird(custom.PassThrough, custom.SampleStage):
    """Gives every third sample."""

    def __next__(self) -> Any:
        return next(sample for sample in self.source if sample.json()["id"] % 3 == 0)


class Swapped(custom.ItemStage):
    """Gives items in pairs, the second one first; the example of the docstring."""

    def __init__(self, source: custom.ItemStage) -> None:
        super().__init__(source)
        self.ref = self.held = ()

    ref: custom.ItemRef = ()

    def __next__(self) -> Any:
        if self.held:
            self.ref, self.held = custom.as_ref(self.held), ()
            if not isinstance(item := self.source.fetch(self.ref), sp.Skip):
                return item
        first = next(self.source)
        self.held = self.source.ref
        for second in self.source:
            self.ref = self.source.ref
            return second
        self.ref, self.held = self.held, ()  # the last one of an odd number
        return first

    def save_state(self) -> Any:
        return {"held": self.held, "source": self.source.save_state()}

    def restore_state(self, state: Any) -> None:
        self.held = state["held"]
        self.source.restore_state(state["source"])


class Delayed(custom.ItemStage):
    """Holds two things back, and takes their refs from a state as they come."""

    ref = ()

    def __init__(self, source: custom.Stage) -> None:
        super().__init__(source)
        self.held: list[Any] = []

    def __next__(self) -> Any:
        while len(self.held) < 2:
            next(self.source)
            self.held.append(self.source.ref)
        next(self.source)
        self.held.append(self.source.ref)
        self.ref = self.held.pop(0)
        return self.source.fetch(self.ref)

    def save_state(self) -> Any:
        return {"held": list(self.held), "source": self.source.save_state()}

    def restore_state(self, state: Any) -> None:
        self.held = list(state["held"])
        self.source.restore_state(state["source"])


class Doubled(custom.BatchStage):
    """Joins two batches of lists to one, which `tail="pad"` can fill up."""

    ref = ()

    def __next__(self) -> Any:
        batches, refs = [next(self.source)], [self.source.ref]
        for batch in islice(self.source, 1):
            batches.append(batch)
            refs.append(self.source.ref)
        self.ref = (0, *refs)
        return self.filled([row for batch in batches for row in counting(batch)])

    def filled(self, rows: list[Any]) -> Any:
        valid = torch.arange(4) < len(rows)
        return {"rows": rows + [[-1]] * (4 - len(rows)), **({"valid": valid} if self.lane.pad else {})}

    def filler(self) -> Any:
        return self.filled([])


def counting(batch: Any) -> list[Any]:
    """The rows of a batch that count."""
    return [row for i, row in enumerate(batch["rows"]) if "valid" not in batch or batch["valid"][i]]


class Rows(Lengths):
    """Batches are dicts of a list."""

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        return {"rows": items}


@pytest.fixture
def shards(make_shards: Any) -> str:
    return str(make_shards([40, 23, 30]))


def reader(shards: str, lane: sp.Lane, epochs: int | None = None) -> sp.TarShardReader:
    return sp.TarShardReader(shards, lane, epochs=epochs)


def filtered(shards: str, lane: sp.Lane, epochs: int | None) -> custom.Stage:
    samples = sp.ShuffleBuffer(EveryThird(reader(shards, lane, epochs)), size=5)
    return sp.Batcher(sp.Encode(samples, Lengths()), size=2)


def swapped(shards: str, lane: sp.Lane, packed: bool, epochs: int | None) -> custom.Stage:
    items = Swapped(sp.Encode(reader(shards, lane, epochs), Lengths()))
    return sp.Batcher(sp.OnlinePacker(items, max_length=11) if packed else items, size=2)


def delayed_packs(shards: str, lane: sp.Lane, epochs: int | None) -> custom.Stage:
    packs = sp.OnlinePacker(sp.Encode(reader(shards, lane, epochs), Lengths()), max_length=5, policy="sequential")
    return sp.Batcher(Delayed(packs), size=2)


def doubled(shards: str, lane: sp.Lane, epochs: int | None) -> custom.Stage:
    return Doubled(sp.Batcher(sp.Encode(reader(shards, lane, epochs), Rows()), size=2))


@pytest.mark.parametrize(
    ("pipeline", "epochs"),
    [(filtered, None), (partial(swapped, packed=True), 1), (delayed_packs, None), (doubled, 1)],
    ids=["filtered", "swapped, packed", "packs of cut items held", "batches joined"],
)
def test_a_stage_written_from_the_docstring_resumes_exactly(
    shards: str, pipeline: Callable[..., custom.Stage], epochs: int | None
) -> None:
    build = partial(_of, pipeline, shards, epochs)
    assert assert_exact_resume(build, lanes=3, steps=9, world_sizes=(1, 3), chains=1) > 9


def _of(pipeline: Callable[..., custom.Stage], shards: str, epochs: int | None, lane: sp.Lane) -> custom.Stage:
    return pipeline(shards, lane, epochs=epochs)


# Refused when the class is made, or the pipeline.


def test_stage_without_a_declared_element_type_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"Reversed has no `ref`.*\n.*class Reversed\(custom.PassThrough, "):

        class Reversed(custom.ItemStage):
            def __next__(self) -> Any:
                return next(self.source)


def test_library_stages_may_be_subclassed() -> None:
    class Logged(sp.Batcher):
        def __next__(self) -> Any:
            return super().__next__()

    assert issubclass(Logged, custom.BatchStage)


def test_wrong_element_type_is_detected(shards: str) -> None:
    class Swaps(custom.PassThrough, custom.ItemStage):
        held: list[Any] | None = None

        def __next__(self) -> Any:
            if self.held:
                return self.held.pop()
            self.held = [next(self.source)]
            return next(self.source)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        items = Swaps(sp.Encode(reader(shards, lane), Lengths()))
        return sp.Batcher(sp.OnlinePacker(items, max_length=11), size=2)

    with pytest.raises(AssertionError, match="differs in"):
        assert_exact_resume(pipeline, lanes=2, steps=12)


@pytest.mark.parametrize(
    "build,told",
    [
        (lambda s: sp.Encode(sp.Encode(s, Lengths()), Lengths()), "not Encode, which yields items"),
        (lambda s: sp.OnlinePacker(s, max_length=8), "OnlinePacker takes a stage of items"),
        (lambda s: custom.BucketBatcher(s, bounds=[8], size=1), "not TarShardReader, which yields samples"),
        (
            lambda s: sp.Batcher([1, 2], size=3),
            r"Batcher takes a stage of elements \(custom.Stage\), not \[1, 2\]",
        ),  # type: ignore[arg-type]
    ],
)
def test_stages_in_a_wrong_order_are_rejected(shards: str, build: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(reader(shards, sp.Lane()))


@pytest.mark.long
def test_a_type_checker_finds_stages_in_a_wrong_order(tmp_path: Path) -> None:
    mypy = pytest.importorskip("mypy.api")
    script = tmp_path / "train.py"
    script.write_text(
        "import savable_pipeline as sp\n"
        "reader = sp.TarShardReader('shards', sp.Lane())\n"
        "items = sp.Encode(reader, sp.TaskEncoder())\n"
        "sp.ShuffleBuffer(sp.ShuffleBuffer(items, size=3), size=3)\n"
        "sp.Encode(items, sp.TaskEncoder())\n"
        "sp.OnlinePacker(reader, max_length=8)\n"
        "sp.Encode(sp.Blend({'a': items}, weights={'a': 1}), sp.TaskEncoder())\n"
        "sp.Batcher(sp.OnlinePacker(items, max_length=8), size=2)\n"
        "sp.Encode(sp.Blend({'a': reader}, weights={'a': 1}), sp.TaskEncoder())\n"
    )
    root = Path(__file__).parents[2]
    told, _, _ = mypy.run([f"--config-file={root / 'pyproject.toml'}", "--no-incremental", str(script)])
    assert [int(line.split(":")[1]) for line in told.splitlines() if "error:" in line] == [5, 6, 7]


# A source of only __next__.


@pytest.mark.parametrize("epochs", [None, 1])
def test_shuffle_buffer_accepts_a_source_with_only_next(shards: str, epochs: int | None) -> None:
    buffer = sp.ShuffleBuffer(EveryThird(reader(shards, sp.Lane(), epochs)), size=4)
    given = [sample.json()["id"] for sample, _ in zip(buffer, range(93), strict=False)]
    assert set(given) == set(range(0, 93, 3))
    assert len(given) == (31 if epochs else 93)


# Padded and avoided.


def test_batch_stage_with_padding_batches_is_padded(shards: str) -> None:
    loader = sp.SavableLoader(partial(_of, doubled, shards, 1), seed=1, lanes=4, tail="pad")
    batches = list(loader)
    assert sum(int(batch["valid"].sum()) for batch in batches) == 93
    assert len(batches) % 4 == 0


def test_batch_stage_without_padding_batches_is_rejected(shards: str) -> None:
    class Same(custom.PassThrough, custom.BatchStage):
        def __next__(self) -> Any:
            return next(self.source)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return Same(doubled(shards, lane, 1))

    with pytest.raises(ValueError, match=r"tail='pad' needs a last stage with filler\(\), not Same"):
        next(iter(sp.SavableLoader(pipeline, seed=1, lanes=4, tail="pad")))


class OwnEncode(custom.ItemStage):
    """Encodes by itself, and can leave samples out."""

    ref: custom.ItemRef = ()

    def __init__(self, source: custom.SampleStage) -> None:
        super().__init__(source)
        self.left_out: set[tuple[int, int]] = set()

    def __next__(self) -> Any:
        sample = next(sample for sample in self.source if (sample.index, sample.epoch) not in self.left_out)
        self.ref = self.source.ref
        return sample.json()["id"]

    def fetch(self, ref: Any) -> Any:
        return self.source.fetch(ref).json()["id"]

    def can_skip(self, error: sp.SavableError) -> bool:
        return True

    def avoid(self, index: int, epoch: int, reason: str) -> None:
        self.left_out.add((index, epoch))


def test_users_stage_gets_the_samples_to_avoid(shards: str) -> None:
    from savable_pipeline.run.engine.lane_runner import LaneRunner
    from savable_pipeline.run.engine.messages import LaneJob
    from savable_pipeline.run.state.lane_state import LaneState, pack_state

    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(OwnEncode(sp.TarShardReader(shards, lane, shuffle=False)), size=3)

    runner = LaneRunner(LaneJob(pipeline, 0, 1), shared={})
    found = runner.deliver(0, pack_state(LaneState(0, 0)), avoid=[(1, 0), (3, 0)])
    assert found.batch == [0, 2, 4]


# What the loader asks for.


class Files:
    """The files that an own stage reads."""

    def __init__(self) -> None:
        self.looked: list[int] = []
        self.store = self

    def verify(self, slot: int) -> None:
        self.looked.append(slot)

    def verify_yielded(self) -> None:
        self.looked.append(-1)


class Reading(custom.PassThrough, custom.SampleStage):
    """Has what the loader asks of stages that read files, or know their length."""

    def __init__(self, source: custom.SampleStage) -> None:
        super().__init__(source)
        self.datasets = (Files(),)
        self.held = custom.ItemBuffer(self)
        self.held.add([Element((number, 0, 0), "a sample") for number in range(7)])

    def __next__(self) -> Any:
        return next(self.source)

    def count_of(self, lane: int, epoch: int) -> int | None:
        return 5


def test_loader_calls_optional_methods_of_a_stage_that_has_them(shards: str) -> None:
    from savable_pipeline.run.engine.lane_runner import LaneRunner
    from savable_pipeline.run.engine.messages import LaneJob
    from savable_pipeline.run.state.lane_state import LaneState, pack_state

    made: list[Reading] = []

    def pipeline(lane: sp.Lane) -> custom.Stage:
        made.append(Reading(sp.TarShardReader(shards, lane, epochs=1)))
        return sp.Batcher(made[-1], size=3)

    status = memoryview(bytearray(128)).cast("Q")  # as in a worker, where lanes move
    runner = LaneRunner(LaneJob(pipeline, 0, 1), shared={}, status=status)
    found = runner.deliver(0, pack_state(LaneState(0, 0)))
    runner.verify_delivered()
    assert made[-1].datasets[0].looked == [0, -1] and found.rebuild_s > 0
    assert len(sp.SavableLoader(pipeline, seed=0, lanes=1)) == 2  # of 5 elements


def test_custom_stage_has_few_public_members() -> None:
    members = {*dir(custom.Stage), *custom.Stage.__annotations__}
    assert len({name for name in members if name[0] != "_"}) <= 12


OF_A_STAGE = {"chunked", "take_elements", "value_of", "count_of"}


def names_used_of_others(kind: ast.ClassDef) -> set[str]:
    """What a class uses of the stage before it: its members, and the functions of `chunked_stage.py`."""
    used = set()
    for node in ast.walk(kind):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rstrip(")").split(".")[-1] in {
            "source",
            "stage",
        }:
            used.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OF_A_STAGE:
            used.add(node.func.id)
    return used


def test_a_stage_uses_few_names_of_another() -> None:
    used = {
        kind.name: names_used_of_others(kind)
        for path in Path(custom.__file__).parent.glob("stages/**/*.py")
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
    }
    assert len(used["Blend"]) > 4, "nothing is counted"
    assert not {name: names for name, names in used.items() if len(names) > 8}


# A filter that leaves everything out.


class Nothing(custom.PassThrough, custom.ItemStage):
    """Leaves every item out."""

    def __next__(self) -> Any:
        return next(item for item in self.source if item is None)


@pytest.mark.parametrize("buffer", [1, 2000])
def test_endless_run_that_yields_nothing_ends_with_an_error(
    shards: str, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("savable_pipeline.stages.readers.lane_shares._UNUSED", 1000)

    def pipeline(lane: sp.Lane) -> custom.Stage:
        samples = sp.ShuffleBuffer(reader(shards, lane), size=buffer)
        return sp.Batcher(Nothing(sp.Encode(samples, NumberEncoder())), size=2)

    with pytest.raises(sp.SavableError, match=r"read 1,0\d\d samples without a batch .its share is 4[67]"):
        next(iter(sp.SavableLoader(pipeline, seed=1, lanes=2)))


def test_batch_that_needs_several_epochs_of_a_lane_is_yielded(shards: str) -> None:
    def pipeline(lane: sp.Lane) -> custom.Stage:
        return sp.Batcher(sp.Encode(EveryThird(reader(shards, lane)), NumberEncoder()), size=20)

    loader = sp.SavableLoader(pipeline, seed=1, lanes=31)
    assert len({number for _, batch in zip(range(31), loader, strict=False) for number in batch}) == 31


def test_stage_has_few_public_names_and_a_file_uses_few_of_another() -> None:
    """What a user must know to write a stage, and what one file of stages must know of another."""
    assert len({name for name in {*dir(custom.Stage), *custom.Stage.__annotations__} if name[0] != "_"}) <= 12
    folder = Path(stages.__file__).parent
    imports = [node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    used = [len(node.names) for node in imports if isinstance(node, ast.ImportFrom) and "stages" in str(node.module)]
    assert max(used) <= 8

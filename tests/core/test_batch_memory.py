"""`stack` and `empty`: the values of torch's own, wherever they lie."""

from __future__ import annotations

import os
import pickle
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

import savable_pipeline as sp
from savable_pipeline import custom
from savable_pipeline.core import batch_memory
from savable_pipeline.core.containers import DifferingItemsError
from savable_pipeline.run.transport.segments import SegmentWriter
from savable_pipeline.stages.batch_difference import digest, first_difference
from tests.conftest import write_tar
from tests.support.streams import next_hashes


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


@pytest.fixture(params=[False, True])
def memory(request: pytest.FixtureRequest) -> Any:
    """In the trainer's process, and as in a worker."""
    writer = SegmentWriter()
    writer.write([memoryview(bytes(1 << 20))])
    writer._segments[1][0] = 0  # the trainer is done with it
    batch_memory.use(writer if request.param else None)
    yield writer if request.param else None
    batch_memory.use(None)


ITEMS = [
    [torch.arange(6).view(2, 3), torch.arange(6, 12).view(2, 3)],
    [torch.rand(3, 4).T, torch.rand(3, 4).T],
    [torch.zeros(0, 4), torch.zeros(0, 4)],
    [torch.tensor(1.5), torch.tensor(2.5)],
    [torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)],
    [torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)],
    [torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.complex64)],
    [torch.ones(2), torch.zeros(2, dtype=torch.float64)],
    [np.ones((2, 2), np.int16), np.zeros((2, 2), np.int16)],
    [{"a": torch.ones(3), "b": [1, "x"]}, {"a": torch.zeros(3), "b": [2, "y"]}],
    [Pair(torch.ones(3), 1), Pair(torch.zeros(3), 2)],
    [1, 2, 3],
    [1.5, 2.5],
    ["a", "b"],
]


@pytest.mark.parametrize("items", ITEMS, ids=[str(number) for number in range(len(ITEMS))])
def test_collate_returns_the_same_batch_as_torch(items: list[Any], memory: Any) -> None:
    assert first_difference(default_collate(items), batch_memory.collate(items)) is None


@pytest.mark.parametrize("items", [[torch.ones(2), torch.ones(3)], [1, "a"], [object(), object()]])
def test_collate_rejects_the_same_items_as_torch(items: list[Any], memory: Any) -> None:
    with pytest.raises(ValueError, match=r"items differ: item 0 has|an item is of type object"):
        batch_memory.collate(items)


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (
            [{"a": {"x": torch.ones(2)}}, {"a": {"x": torch.ones(2)}}, {"a": {"x": torch.ones(2, 3)}}],
            "items differ in ['a']['x']: item 0 has shape (2,), item 2 has shape (2, 3)",
        ),
        ([(1, np.ones(2)), (1, np.ones(3))], "items differ in [1]: item 0 has shape (2,), item 1 has shape (3,)"),
        ([{"a": [1, 2]}, {"a": [1]}], "items differ in ['a']: item 0 has 2 values, item 1 has 1 values"),
        ([{"a": 1}, {"b": 1}], "items differ: item 0 has the fields a, item 1 has the fields b"),
        ([{"a": 1}, {"a": 2, "b": 3}], "items differ: item 0 has the fields a, item 1 has the fields a, b"),
        (
            [(1, {"a": {"x": 1}}), (2, {"a": {"x": 1, "y": 2}})],
            "items differ in [1]['a']: item 0 has the fields x, item 1 has the fields x, y",
        ),
        ([{"a": 1}, {"a": None}], "items differ in ['a']: item 0 has type int, item 1 has type NoneType"),
        ([{"a": None}, {"a": None}], "['a'] is of type NoneType, which cannot be stacked"),
    ],
)
def test_an_error_about_items_that_cannot_be_stacked_names_field_and_shape(items: list[Any], told: str) -> None:
    with pytest.raises(DifferingItemsError) as caught:
        batch_memory.collate(items)
    assert str(caught.value).startswith(told)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.items == caught.value.items


def test_stacked_tensor_is_in_shared_memory_only_in_a_worker(memory: SegmentWriter | None) -> None:
    made = sp.stack([torch.full((100,), number) for number in range(5)])
    assert torch.equal(made, torch.arange(5).view(5, 1).expand(5, 100))
    if memory is not None:
        written = memory.write([memoryview(made.view(torch.uint8).reshape(-1).numpy())])
        assert written.spans == [(64, 4000)] and written.fd is None


@pytest.mark.parametrize("length", [64, 100])
def test_adjacent_tensors_are_stacked_without_a_copy(length: int, memory: SegmentWriter | None) -> None:
    items = [sp.empty((length,), torch.uint8).fill_(number) for number in range(5)]
    other = torch.zeros(length, dtype=torch.uint8)
    made = sp.stack(items)
    assert torch.equal(made, torch.arange(5, dtype=torch.uint8).view(5, 1).expand(5, length))
    assert (made.data_ptr() == items[0].data_ptr()) == (memory is not None and length == 64)
    for chosen in (
        items[::-1],
        [items[i] for i in (0, 2, 1, 3, 4)],
        items[:2] + items[3:],
        [*items[:4], other],
        items[:3] + items[:1],
        items[1:4],
    ):
        assert torch.equal(sp.stack(chosen), torch.stack(chosen))


def test_tensors_of_an_earlier_batch_are_copied(memory: SegmentWriter | None) -> None:
    items = [sp.empty((64,), torch.uint8).fill_(number) for number in range(2)]
    if memory is not None:
        memory.write([memoryview(items[0].numpy())])
        assert sp.stack(items).data_ptr() != items[0].data_ptr()


def test_tensors_with_gradients_are_stacked_as_torch_does(memory: Any) -> None:
    assert sp.stack([torch.ones(2, requires_grad=True), torch.ones(2)]).requires_grad


def test_empty_has_the_requested_shape_and_dtype(memory: Any) -> None:
    for shape in [(), (0,), (3, 0, 2), (4, 5)]:
        for dtype in (torch.uint8, torch.float64, torch.bfloat16):
            made = sp.empty(shape, dtype)
            assert (tuple(made.shape), made.dtype) == (shape, dtype)


class Varying(sp.TaskEncoder):
    """Batches whose size varies from a few bytes to a megabyte, made partly in shared memory."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        return sample.json()["id"]

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        length = rng.choice([1, 100, 5_000, 40_000])
        stacked = sp.stack([torch.full((length,), item) for item in items])
        filled = sp.empty((length,), torch.float32).fill_(items[0])
        return {"stacked": stacked, "again": stacked, "plain": torch.full((length,), items[0]), "filled": filled}


def varying(shards: str, epochs: int | None, lane: sp.Lane) -> custom.Stage:
    return sp.Batcher(sp.Encode(sp.TarShardReader(shards, lane, epochs=epochs), Varying()), size=4)


@pytest.mark.parametrize(("hold", "epochs"), [(0, 1), (20, None)])
def test_batches_of_any_size_are_equal_with_and_without_workers(
    make_shards: Any, epochs: int | None, hold: int
) -> None:
    pipeline = partial(varying, str(make_shards([120, 100])), epochs)
    alone = sp.SavableLoader(pipeline, seed=1, lanes=6)
    expected = next_hashes(alone, 50)
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2) as loader:
        held, found = [], []
        for _, batch in zip(range(50), loader, strict=False):
            found.append(digest(batch))
            held = [batch, *held][:hold]
        assert found == expected
        assert [digest(batch) for batch in held] == expected[: -hold - 1 : -1][: len(held)]


class Raw(sp.TaskEncoder):
    """Parts as they are, stacked if they can be, and in a list."""

    global_rng = False

    def encode(self, sample: sp.Sample, rng: sp.Rng) -> Any:
        made = sample.array("bin")
        made[:1] ^= 1  # it is ours to write to
        return made

    def batch(self, items: list[Any], rng: sp.Rng) -> Any:
        tensors = [torch.from_numpy(item) for item in items]
        return {"stacked": sp.stack(tensors) if len({len(item) for item in items}) == 1 else None, "items": items}


def raw_pipeline(shards: str, lane: sp.Lane) -> custom.Stage:
    samples = sp.ShuffleBuffer(sp.TarShardReader(shards, lane), size=10)
    return sp.Batcher(sp.Encode(samples, Raw()), size=4)


@pytest.mark.parametrize("sizes", [[6400], [0, 1, 64, 30_000, 200_000]])
def test_arrays_read_in_place_are_equal_with_and_without_workers(tmp_path: Path, sizes: list[int]) -> None:
    payloads = [bytes([number % 251]) * sizes[number % len(sizes)] for number in range(90)]
    write_tar(tmp_path / "0.tar", [(f"{number:03}.bin", payload) for number, payload in enumerate(payloads)])
    pipeline = partial(raw_pipeline, str(tmp_path))
    expected = next_hashes(sp.SavableLoader(pipeline, seed=1, lanes=6), 30)
    with sp.SavableLoader(pipeline, seed=1, lanes=6, num_workers=2) as loader:
        assert next_hashes(loader, 30) == expected
        state = loader.state_dict()
        after = next_hashes(loader, 10)
        loader.load_state_dict(state)
        assert next_hashes(loader, 10) == after


def test_array_has_the_bytes_of_the_part_and_raises_the_errors_of_read(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.bin", b"12345"), ("b.bin", bytes(3000))])
    first, second = islice(sp.TarShardReader(tmp_path, sp.Lane(), shuffle=False), 2)
    for sample in (first, pickle.loads(pickle.dumps(first))):
        array = sample.array("BIN")
        assert (array.tobytes(), array.dtype, array.flags.writeable) == (b"12345", np.uint8, True)
        with pytest.raises(KeyError, match="no part 'txt'; the sample has bin"):
            sample.array("txt")
    os.truncate(tmp_path / "0.tar", 2048)
    with pytest.raises(sp.ShardError, match="The file was cut short"):
        second.array("bin")

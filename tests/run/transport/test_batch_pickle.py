"""What passes from a worker to the trainer: every kind of tensor, array and container, equal and writable."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import savable_pipeline as sp
from savable_pipeline.run.transport.batch_pickle import dumps, loads
from savable_pipeline.stages.batch_difference import digest

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def passed(value: Any) -> Any:
    pieces, buffers = dumps(value)
    return loads(b"".join(pieces), [bytearray(buffer) for buffer in buffers])


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (), (0,), (2, 0, 3), (1, 1)], ids=str)
def test_tensors_of_every_dtype_and_shape_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty(shape).numel() * dtype.itemsize
    bits = torch.arange(size, dtype=torch.uint8) % 2  # a bool is 0 or 1
    tensor = bits.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    found = passed(tensor)
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    assert not size or raw(found) == raw(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24).reshape(4, 6)[:, ::2],
        torch.arange(24).reshape(4, 6)[1:3, 2:],
        torch.arange(24).reshape(2, 3, 4).transpose(0, 2),
        torch.arange(3).expand(4, 3),
        torch.arange(3)[:, None].expand(3, 4),
        torch.arange(1).expand(5),
        torch.arange(6).flip(0),
        torch.arange(2**16).reshape(256, 256).t(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_non_contiguous_tensors_arrive_equal_and_writable(tensor: torch.Tensor) -> None:
    found = passed(tensor)
    assert torch.equal(found, tensor)
    found += 1
    assert torch.equal(found, tensor + 1)  # every element is its own, of an expanded tensor too


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 5).t(),
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(1, 3, 1, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_unpickled_tensor_has_the_same_memory_format(tensor: torch.Tensor) -> None:
    found = passed(tensor)
    assert torch.equal(found, tensor)
    sizes = [size > 1 for size in tensor.shape]
    assert [s for s, many in zip(found.stride(), sizes, strict=True) if many] == [
        s for s, many in zip(tensor.stride(), sizes, strict=True) if many
    ]


def test_large_tensors_and_arrays_are_not_copied_and_small_ones_are() -> None:
    large, small = torch.arange(4096), np.arange(512)
    pieces, buffers = dumps({"large": large, "array": np.zeros((3, 4096)), "small": small})
    assert [len(buffer) for buffer in buffers] == [8 * 4096, 8 * 3 * 4096]
    assert len(b"".join(pieces)) < 8 * 512 + 1000
    large[0] = 7
    assert loads(b"".join(pieces), buffers)["large"][0] == 7  # a view


def test_a_slice_carries_only_its_own_bytes() -> None:
    pieces, buffers = dumps(torch.zeros(1_000_000)[:10])
    assert len(b"".join(pieces)) < 500 and not buffers


def test_large_bytes_are_out_of_band_and_not_copied() -> None:
    large = bytes(100_000)
    pieces, buffers = dumps(["a", large, bytearray(b"b" * 100_000), "c" * 100_000])
    assert any(piece is large for piece in pieces) and not buffers
    assert loads(b"".join(pieces), []) == ["a", large, bytearray(b"b" * 100_000), "c" * 100_000]


@pytest.mark.filterwarnings("ignore:.*deprecat", "ignore:.*[Ss]parse", "ignore:.*prototype", "ignore:.*removed")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
        lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(3, requires_grad=True),
        lambda: torch.randn(6, requires_grad=True)[::2] * 2,
        lambda: torch.nn.Parameter(torch.randn(3)),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
    ],
    ids=["conj", "neg", "leaf", "not a leaf", "parameter", "sparse", "sparse rows", "quantized"],
)
def test_tensor_subclasses_keep_their_class(make: Any) -> None:
    tensor = make()
    found = passed(tensor)
    assert type(found) is type(tensor)
    assert (found.layout, found.dtype, found.requires_grad) == (tensor.layout, tensor.dtype, tensor.requires_grad)
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    whole, expected = (t.dequantize() if t.is_quantized else t.to_dense() for t in (found, tensor))
    assert torch.equal(whole, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_round_trip(layout: torch.layout) -> None:
    found = passed(torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)], layout=layout))
    assert [part.tolist() for part in found.unbind()] == [[1, 1], [0, 1, 2]]


def test_unpickled_arrays_are_writable() -> None:
    found = passed({"tensor": torch.zeros(3), "array": np.zeros(3), "empty": torch.zeros(0), "scalar": torch.tensor(1)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found["tensor"] += 1
        found["scalar"] += 1
        found["empty"] += 1
        found["array"] += 1
        torch.from_numpy(found["array"])
    assert (found["tensor"] == 1).all() and (found["array"] == 1).all() and found["scalar"] == 2


def test_tensors_that_share_storage_arrive_as_separate_equal_tensors() -> None:
    base = torch.arange(10)
    first, second, same = passed([base[:5], base[3:8], base[:5]])
    assert (first.tolist(), second.tolist(), same.tolist()) == ([0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [0, 1, 2, 3, 4])
    first += 100
    assert second.tolist() == [3, 4, 5, 6, 7]


def test_tensor_referenced_twice_stays_one() -> None:
    tensor = torch.arange(10)
    first, second = passed([tensor, tensor])
    assert first is second


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.arange(6).reshape(2, 3).T,
        np.arange(12).reshape(3, 4)[:, ::2],
        np.empty((0, 2)),
        np.array(3.0),
        np.float32(2.5),
        np.array(["ab", "c"]),
        np.array([{"a": 1}, None], dtype=object),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.asfortranarray(np.ones((2, 3))),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_arrays_of_every_kind_round_trip(array: Any) -> None:
    found = passed(array)
    assert type(found) is type(array) and found.dtype == array.dtype and found.shape == array.shape
    assert np.array_equal(found, array)


class Batch(NamedTuple):
    images: torch.Tensor
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Packed:
    tokens: torch.Tensor
    lengths: tuple[int, ...]


Old = namedtuple("Old", ["a", "b"])


def test_containers_of_every_kind_keep_their_types_and_order() -> None:
    batch = {
        "named": Batch(torch.ones(2), ["a", "ü"]),
        "data": Packed(torch.arange(3), (1, 2)),
        "old": Old(torch.zeros(1), None),
        "ordered": OrderedDict(z=torch.ones(1), a=1),
        "nested": [({"a": [torch.ones(1)]}, {1, 2}), frozenset("ab")],
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"abc"),
        "plain": (1, 2.5, True, None, 2**100, "text", 1j),
        3: torch.tensor(7),
    }
    found = passed(batch)
    assert list(found) == list(batch)
    assert digest(found) == digest(batch)
    assert type(found["named"]) is Batch and type(found["data"]) is Packed and type(found["old"]) is Old
    assert type(found["ordered"]) is OrderedDict and type(found["bytearray"]) is bytearray


def test_a_sample_arrives_with_its_parts_and_its_ref(make_shards: Any) -> None:
    sample = next(sp.TarShardReader(make_shards([3]), sp.Lane(), shuffle=False))
    found = passed(sample)
    assert (found.json(), found.key, found.ref, found.shard) == ({"id": 0}, "s000000", sample.ref, "0000.tar")


def test_unpicklable_object_is_an_error_not_a_hang() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        dumps({"a": lambda: 1})
    with pytest.raises(TypeError):
        dumps({"a": Path(__file__).open()})  # noqa: SIM115

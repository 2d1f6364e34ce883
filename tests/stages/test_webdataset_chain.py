"""`sp.read` of webdataset pipelines: webdataset itself is the oracle of items and batches, and resumes are exact."""

from __future__ import annotations

import io
import json
import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as wds
from PIL import Image

import savable_pipeline as sp
from savable_pipeline.stages.batch_difference import digest
from savable_pipeline.testing import assert_exact_resume
from tests.conftest import write_tar

SHARDS, SAMPLES = 4, 12


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("webdataset")
    for shard in range(SHARDS):
        members = []
        for number in range(SAMPLES):
            image, pixels = io.BytesIO(), np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(image, "PNG")
            identity = shard * SAMPLES + number
            fields = {"id": identity, "words": [f"word {n}" for n in range(number % 3)]}
            members += [(f"{shard}/{number:03}.PNG", image.getvalue()), (f"{shard}/{number:03}.json", _json(fields))]
            members.append((f"{shard}/{number:03}.cls", str(identity).encode()))
        write_tar(folder / f"{shard:03}.tar", members)
    return f"{folder}/{{000..{SHARDS - 1:03}}}.tar"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def dataset(urls: str, **options: Any) -> Any:
    return wds.WebDataset(urls, **{"shardshuffle": False, **options})


def double(number: int) -> int:
    return 2 * number


def is_even(sample: dict[str, Any]) -> bool:
    return bool(sample["cls"] % 2 == 0)


def fail_on_thirds(number: int) -> int:
    if number % 3 == 0:
        raise ValueError("a third")
    return number


def words_of(sample: dict[str, Any]) -> list[str]:
    return [f"{sample['__key__']} {word}" for word in sample["json"]["words"]]


def flip(image: Any) -> torch.Tensor:
    pixels = torch.from_numpy(np.array(image))
    return pixels.flip(1) if random.random() < 0.5 else pixels + np.random.randint(3) + torch.randint(3, ())


def continue_silently(error: Exception) -> bool:
    return True


CHAINS: dict[str, Callable[[Any], Any]] = {
    "no stage": lambda data: data.map(dict),
    "decode": lambda data: data.decode("pil"),
    "decode to arrays": lambda data: data.decode("rgb8", only=["png", "json"]),
    "tuples": lambda data: data.decode("torchrgb").to_tuple("png", "json", "missing;cls"),
    "map_tuple": lambda data: data.decode().to_tuple("cls", "json").map_tuple(double, None),
    "map_dict": lambda data: data.decode("l8").map_dict(cls=double),
    "select": lambda data: data.decode().select(is_even),
    "rename": lambda data: data.rename(image="png;jpg", label="cls", keep=False),
    "rename_keys": lambda data: data.rename_keys(image="*.png", keep_unselected=True, must_match=False),
    "extract_keys": lambda data: data.extract_keys("*.png", "*.cls"),
    "xdecode": lambda data: data.xdecode(must_decode=False),
    "skipped errors": lambda data: data.decode().map_dict(cls=fail_on_thirds, handler=continue_silently),
    "positional handler": lambda data: data.decode().compose(
        wds.map(lambda sample: {"cls": fail_on_thirds(sample["cls"])}, continue_silently)
    ),
    "unlisted": lambda data: data.decode().map(words_of).unlisted(),
    "batched and unbatched": lambda data: data.decode().to_tuple("cls", "json").batched(5).unbatched(),
    "listed and unlisted": lambda data: data.decode().listed(5).unlisted(),
    "files": lambda data: data.map(dict),
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=list(CHAINS))
def test_items_equal_webdatasets_byte_for_byte(urls: str, chain: Callable[[Any], Any]) -> None:
    options = {"select_files": lambda name: not name.endswith("json")} if chain is CHAINS["files"] else {}
    theirs = list(chain(dataset(urls, **options)))
    ours = list(sp.read(chain(dataset(urls, **options)), block_size=1000))
    assert len(theirs) > 5
    assert [digest(_fields(each)) for each in ours] == [digest(_fields(each)) for each in theirs]


def _fields(item: Any) -> Any:
    """A sample with its fields in one order, without the path of a local shard, which old releases do not add."""
    return dict(sorted((n, part) for n, part in item.items() if n != "__local_path__")) if type(item) is dict else item


BATCHES: dict[str, Callable[[Any], Any]] = {
    "batched": lambda data: data.decode("torchrgb").to_tuple("png", "cls").batched(5),
    "only whole batches": lambda data: data.decode().to_tuple("cls").batched(5, partial=False),
    "listed": lambda data: data.decode().to_tuple("cls").listed(5),
    "own collation": lambda data: data.decode().to_tuple("cls").batched(5, collation_fn=sorted),
    "map after batched": lambda data: data.decode().to_tuple("cls").batched(5).map(lambda batch: batch[0] * 2),
    "loader": lambda data: wds.WebLoader(data.decode().to_tuple("cls"), batch_size=5, num_workers=0),
    "loader with its own batches": lambda data: (
        wds.WebLoader(data.decode().to_tuple("cls").batched(3), batch_size=None, num_workers=0).unbatched().batched(5)
    ),
}


@pytest.mark.parametrize("chain", BATCHES.values(), ids=list(BATCHES))
def test_batches_equal_webdatasets_byte_for_byte(urls: str, chain: Callable[[Any], Any]) -> None:
    theirs = [digest(batch) for batch in chain(dataset(urls))]
    assert [digest(batch) for batch in sp.read(chain(dataset(urls)), block_size=1000)] == theirs
    assert len(theirs) in (9, 10)


def test_a_pipeline_resumes_exactly_on_other_workers_and_ranks_with_random_transforms(urls: str) -> None:
    def chain() -> Any:
        data = dataset(urls, shardshuffle=10).shuffle(7).decode("pil").to_tuple("png", "cls")
        return data.map_tuple(flip, double).batched(4)

    pipeline = sp.read(chain())
    assert_exact_resume(pipeline, lanes=4, steps=6, chains=2)
    labels = Counter[int]()
    for rank in range(2):
        with sp.SavableLoader(pipeline, seed=3, lanes=4, ranks=(rank, 2), num_workers=1) as loader:
            for _, numbers in zip(range(6), (batch[1] for batch in loader), strict=True):
                labels.update(numbers.tolist())
    assert labels == Counter(2 * number for number in range(SHARDS * SAMPLES))


def test_skips_are_counted_and_pipelines_without_batches_can_be_extended(urls: str) -> None:
    items = sp.read(dataset(urls).decode().map_dict(cls=fail_on_thirds, handler=continue_silently).to_tuple("cls"))
    with sp.SavableLoader(items.batch(4), seed=1, lanes=2) as loader:
        taken = [int(label) for batch in loader for label in batch[0]]
        assert loader.stats()["Encode/skipped/ValueError"] == 16
    assert sorted(taken) == [number for number in range(48) if number % 3]
    mixed = sp.blend({"a": items, "b": items}, weights={"a": 1, "b": 3})
    assert len(mixed.batch(4).take(2)) == 2


def test_webdataset_can_mix_and_repeat(urls: str, caplog: pytest.LogCaptureFixture) -> None:
    parts = [dataset(urls).decode().to_tuple("cls"), dataset(urls).decode().to_tuple("cls").map_tuple(double)]
    mixed = wds.DataPipeline(wds.RandomMix(parts, probs=[3, 1]), wds.map_tuple(double), wds.batched(16))
    (numbers,) = next(iter(sp.read(mixed)))
    assert (numbers % 2 == 0).all() and len(numbers) == 16
    taken = [int(label[0]) for label in sp.read(wds.RoundRobin(parts, longest=True))]
    assert Counter(taken) == Counter(int(label[0]) for label in wds.RoundRobin(parts, longest=True))
    assert len(list(sp.read(dataset(urls).repeat(2)))) == 2 * SHARDS * SAMPLES
    with caplog.at_level(logging.WARNING):
        endless = sp.read(wds.WebDataset(urls, resampled=True).decode().to_tuple("cls").batched(4).with_epoch(7))
    assert "epoch_slots=" in caplog.text
    with sp.SavableLoader(endless, seed=1, lanes=2, epoch_slots=14) as loader:
        assert len(list(loader)) == len(list(loader)) == 14


def test_parts_that_are_not_selected_are_dropped_without_any_stage(urls: str) -> None:
    chosen = dataset(urls, select_files=lambda name: name.endswith("cls"))
    assert [digest(_fields(each)) for each in sp.read(chosen, block_size=1000)] == [
        digest(_fields(each)) for each in chosen
    ]


def marked(name: str, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, name: True}


def test_stages_after_a_mix_of_mixes_run_on_all_samples(urls: str) -> None:
    inner = wds.DataPipeline(
        wds.RoundRobin([dataset(urls), dataset(urls)], longest=True), wds.map(partial(marked, "a"))
    )
    outer = wds.DataPipeline(wds.RoundRobin([inner, dataset(urls)], longest=True), wds.map(partial(marked, "b")))
    theirs = Counter(("a" in sample, "b" in sample) for sample in outer)
    assert Counter(("a" in sample, "b" in sample) for sample in sp.read(outer)) == theirs
    assert len(list(sp.read(outer.repeat(2)))) == 6 * SHARDS * SAMPLES


def test_repetitions_inside_each_other_multiply(urls: str) -> None:
    def loader(data: Any) -> Any:
        return wds.WebLoader(data, batch_size=None, num_workers=0)

    assert len(list(sp.read(loader(dataset(urls).repeat(2)).repeat(3)))) == 6 * SHARDS * SAMPLES
    endless = sp.read(loader(wds.WebDataset(urls, resampled=True)).repeat(2)).batch(4, encoder=None)
    with sp.SavableLoader(endless, seed=1, lanes=2, epoch_slots=8 * SHARDS * SAMPLES) as run:
        assert len(list(run)) == 8 * SHARDS * SAMPLES


def holds_samples(samples: Any) -> Iterator[Any]:
    previous = 0
    for sample in samples:
        yield previous + sample["cls"]
        previous = sample["cls"]


def counts_words(samples: Any) -> Iterator[Any]:
    for sample in samples:
        yield from ((sample["cls"], word, random.random()) for word in sample["json"]["words"])


class OwnShuffle(wds.PipelineStage):
    def __init__(self, bufsize: int) -> None:
        self.bufsize = bufsize

    def run(self, source: Any) -> Any:
        return iter(sorted(source, key=str))


def own_samples(source: Any) -> Any:
    return wds.tarfile_to_samples()(source)


def test_users_stages_are_rejected_by_name_checked_or_replaced(urls: str) -> None:
    decoded = dataset(urls).decode()
    with pytest.raises(ValueError, match=r"stage counts_words exactly\. .*per_sample=\[it\]"):
        sp.read(decoded.compose(counts_words))
    words = list(sp.read(decoded.compose(counts_words), per_sample=[counts_words], block_size=1000))
    assert [each[:2] for each in words] == [each[:2] for each in decoded.compose(counts_words)]
    with pytest.raises(sp.EncodeError, match=r"depends on other samples.*Remove it from per_sample="):
        list(sp.read(decoded.compose(holds_samples), per_sample=[holds_samples]))
    shards = [wds.SimpleShardList(urls), OwnShuffle(9), wds.split_by_node, wds.split_by_worker]
    own = wds.DataPipeline(*shards, own_samples, OwnShuffle(9), wds.decode(), wds.to_tuple("cls"))
    pipeline = sp.read(own, replace={OwnShuffle: wds.detshuffle, own_samples: wds.tarfile_to_samples})
    assert "ShuffleBuffer(size=9)" in repr(pipeline)
    assert sorted(label for (label,) in pipeline) == list(range(SHARDS * SAMPLES))


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda urls: dataset(urls).slice(10), r"stage islice exactly\. .*subset="),
        (lambda urls: dataset(urls).compose(wds.info()), r"stage info exactly\. .*savable preview"),
        (lambda urls: dataset(urls).decode(handler=wds.warn_and_stop), "handler=warn_and_stop would end the run"),
        (lambda urls: dataset(urls).decode().batched(4).shuffle(9), r"shuffle\(\) after batched\(\)"),
        (lambda urls: dataset(urls).decode().batched(4).batched(4), r"one batched\(\)"),
        (lambda urls: dataset(urls).repeat(2, nbatches=9), r"repeat\(nbatches=9\) would end in the middle"),
        (lambda urls: dataset(urls, rename_files=str.lower), "does not support rename_files="),
        (lambda urls: wds.RandomMix([dataset(urls).batched(3)]), "mixes batches"),
        (lambda urls: wds.DataPipeline(wds.map(dict)), "no shard list"),
    ],
)
def test_a_stage_that_cannot_be_exact_is_an_error_that_names_it(
    urls: str, chain: Callable[[str], Any], message: str
) -> None:
    with warnings.catch_warnings(), pytest.raises(ValueError, match=message):
        sp.read(chain(urls))


def test_a_pipe_and_a_pickled_part_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(sp.ShardError, match="pipe:"):
        list(sp.read(dataset("pipe:cat a.tar").decode()))
    write_tar(tmp_path / "a.tar", [("a.pyd", b"cos\nsystem\n(S'touch ran'\ntR.")])
    with pytest.raises(sp.EncodeError, match=r"would unpickle the part 'pyd'"):
        list(sp.read(dataset(str(tmp_path / "a.tar")).decode()))


def test_a_state_of_another_pipeline_is_rejected(urls: str) -> None:
    def loader(spec: str) -> sp.SavableLoader:
        return sp.SavableLoader(sp.read(dataset(urls).decode(spec).to_tuple("cls").batched(4)), seed=1, lanes=2)

    state = loader("rgb8").state_dict()
    loader("rgb8").load_state_dict(state)
    with pytest.raises(sp.CheckpointMismatchError, match="rgb8"):
        loader("l8").load_state_dict(state)

"""With every generator seeded alike, each sample, pack and batch equals what Energon itself makes of the data."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")

from tests.energon import prepared  # noqa: E402
from tests.energon.prepared import by_both, text_of, texts, write  # noqa: E402


@energon.stateless
def cook(sample: dict[str, Any]) -> Any:
    text = sample["json"]["text"] + sample["txt"] + str(sample["__subflavors__"])
    return energon.TextSample(**energon.basic_sample_keys(sample), text=text)


@dataclass
class Tokens(energon.Sample):  # type: ignore[misc]
    tokens: torch.Tensor
    noise: float


def noise() -> float:
    return random.random() + float(np.random.rand()) + torch.rand(()).item()


class Writer(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Every kind of method: a generator, skipped samples, errors, and random numbers in all of them."""

    cookers = [energon.Cooker(cook)]  # noqa: RUF012

    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("3"):
            raise energon.SkipSample
        if sample.__key__.endswith("5"):
            raise ValueError("of no use")
        tokens = torch.tensor(list(sample.text.encode()))
        yield Tokens.derive_from(sample, tokens=tokens, noise=noise())
        if sample.__key__.endswith("7"):
            yield Tokens.derive_from(sample, tokens=tokens[:3], noise=0.5)

    @energon.stateless(restore_seeds=True)
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        groups = [[sample] for sample in samples if not sample.__key__.endswith("1")]
        random.shuffle(groups)
        return groups

    @energon.stateless(restore_seeds=True)
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        if samples[0].__key__.endswith("4"):
            raise energon.SkipSample
        return Tokens.derive_from(samples[0], tokens=samples[0].tokens, noise=samples[0].noise + noise())

    @energon.stateless(restore_seeds=True)
    def batch(self, samples: list[Any]) -> Any:
        if samples[0].__key__.endswith("8"):
            raise energon.SkipSample
        return super().batch(samples)

    @energon.stateless(restore_seeds=True)
    def encode_batch(self, batch: Any) -> Any:
        return {"batch": batch, "noise": noise()}


class Late(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Encodes before and after packing."""

    cookers = [energon.Cooker(cook)]  # noqa: RUF012

    @energon.stateless(restore_seeds=True)
    def preencode_sample(self, sample: Any) -> Any:
        return Tokens.derive_from(sample, tokens=torch.tensor(list(sample.text.encode())), noise=noise())

    @energon.stateless(restore_seeds=True)
    def postencode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("6"):
            raise energon.SkipSample
        return Tokens.derive_from(sample, tokens=sample.tokens.flip(0), noise=sample.noise + noise())

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        samples.sort(key=lambda sample: sample.__key__)
        return [samples]

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return Tokens.derive_from(samples[0], tokens=torch.cat([each.tokens for each in samples]), noise=0.0)


class ByLength(energon.TaskEncoder):  # type: ignore[misc]
    """Groups that say how large their batches are, and a `batch` of its own; rests are smaller."""

    cookers = [energon.Cooker(cook)]  # noqa: RUF012

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return ("long", 2) if len(sample.text) > 35 else ("short", 4)

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return {"keys": [sample.__key__ for sample in samples], "letters": sum(len(sample.text) for sample in samples)}

    @energon.stateless
    def encode_batch(self, batch: Any) -> Any:
        return {**batch, "encoded": True}


class ByLengthAlone(ByLength):
    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return super().batch_group_criterion(sample)[0], None


class OfAKind(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """Makes samples by a class that it holds, in a method that is not marked as stateless."""

    cookers = [energon.Cooker(cook)]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.kind = Tokens

    def encode_sample(self, sample: Any) -> Any:
        names = {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__}
        return self.kind(**names, tokens=torch.tensor([len(sample.text)]), noise=0.5)


class Images(energon.DefaultTaskEncoder):  # type: ignore[misc]
    """What a field map gives, as it is."""

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        return samples[0]


@pytest.mark.parametrize("packing", [None, 7])
@pytest.mark.parametrize("make", [Writer, Late])
def test_samples_and_packs_of_cooked_samples_equal_energons(
    make: Any, packing: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = texts(tmp_path / "data", 24)
    if make is Late and packing is not None:
        packing = 24
    theirs, mine = by_both(root, make, monkeypatch, packing_buffer_size=packing)
    assert mine == theirs
    assert len(mine) > (0 if make is Late and packing else 10)


def test_encoder_with_a_class_equals_energons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = by_both(texts(tmp_path / "data", 6), OfAKind, monkeypatch)
    assert mine == theirs
    assert len(mine) == 6


@pytest.mark.parametrize(("make", "batch_size", "drop_last"), [(ByLength, None, False), (ByLengthAlone, 3, True)])
def test_batches_of_groups_equal_energons(
    make: Any, batch_size: int | None, drop_last: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = texts(tmp_path / "data", 40)
    in_order = {"shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1}
    settings = {"batch_size": batch_size, "batch_drop_last": drop_last, **in_order}
    theirs, mine = by_both(root, make, monkeypatch, **settings)
    assert mine == theirs
    sizes = {len(batch["keys"]) for batch in mine}
    assert {2, 4} <= sizes if batch_size is None else 3 in sizes
    assert all(batch["encoded"] for batch in mine)


def test_sample_types_field_maps_and_images_equal_energons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = (
        "sample_type: {__module__: megatron.energon, __class__: VQASample}\n"
        "field_map: {image: 'jpg,png', context: 'json[q][0]', answers: json, answer_weights: json}\n"
        "subflavors: {a: 1}\n"
    )
    parts = {"png": prepared.png(3)}
    root = write(tmp_path / "data", 6, lambda i: {**parts, "json": {"q": [text_of(i)]}}, yaml)
    for settings in ({}, {"image_decode": "pil"}, {"auto_decode": False}):
        if "auto_decode" in settings:
            yaml = yaml.replace("'json[q][0]'", "json")
            (root / ".nv-meta/dataset.yaml").write_text(yaml)
        theirs, mine = by_both(root, Images, monkeypatch, **settings)
        assert mine == theirs
        assert len(mine) == 6


def test_files_of_lines_equal_energons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors.jsonl.jsonl_prepare import JsonlPreparator

    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text_of(i)}) + "\n" for i in range(9)))
    JsonlPreparator.prepare_dataset(EPath(str(path)))

    class Lines(Images):
        cookers = [energon.Cooker(energon.stateless(lambda sample: dict(sample)))]  # noqa: RUF012

    theirs, mine = by_both(path, Lines, monkeypatch)
    assert mine == theirs
    assert len(mine) == 9


def test_auxiliary_and_primary_datasets_equal_energons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared.prepared_by_energon(texts(tmp_path / "data", 12))
    extra = write(tmp_path / "extra", 12, lambda i: {"json": {"more": i}, "png": prepared.png(i)})
    prepared.prepared_by_energon(extra)
    (tmp_path / "files").mkdir()
    (tmp_path / "files/note.txt").write_text("a note")
    (tmp_path / "meta.yaml").write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {path: data, subflavors: {b: 2}, "
        "aux: {extra: extra, files: 'filesystem://files'}}}\n"
    )

    @energon.stateless
    @energon.cooker(need_primary=True, need_cache=True)
    def look(sample: dict[str, Any], primary: Any, extra: Any, files: Any, cache: Any) -> Any:
        key = sample["__key__"]
        found = [primary.get(".json", sample), extra.get(f"{key}.png", sample), files.get("note.txt")]
        return {**sample, "found": [*found, cache.get_lazy(extra, f"{key}.json").get(sample)]}

    class Looking(Images):
        cookers = [  # noqa: RUF012
            energon.Cooker(cook, has_subflavors={"b": 3}),
            energon.Cooker(look, has_subflavors={"b": 2}),
        ]

    theirs, mine = by_both(tmp_path / "meta.yaml", Looking, monkeypatch)
    assert mine == theirs
    assert len(mine) == 12
    assert mine[0]["found"][3] == {"more": 0}


def test_joined_datasets_equal_energons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = "sample_type: {__module__: megatron.energon, __class__: %s}\nfield_map: {%s}\n"
    first = write(tmp_path / "first", 12, lambda i: {"txt": text_of(i)}, typed % ("TextSample", "text: txt"))
    second = write(tmp_path / "second", 8, lambda i: {"png": prepared.png(i)}, typed % ("ImageSample", "image: png"))
    for root in (first, second):
        prepared.prepared_by_energon(root)
    path = tmp_path / "joined.yaml"
    head = (
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {join: [{path: first}, {path: second, "
    )
    tail = "}], joiner: {__module__: tests.energon.test_equal_samples, __class__: Joined}}}\n"
    path.write_text(f"{head}nonmatch: skip{tail}")
    energon.prepare_metadataset(energon.epathlib.EPath(str(path)))
    theirs, mine = by_both(path, Images, monkeypatch, trust=True)
    assert mine == theirs
    assert len(mine) == 8
    path.write_text(f"{head}nonmatch: none{tail}")  # of which Energon 7.4.1 cannot read a sample that has no match
    settings: dict[str, Any] = {"batch_size": 1, "lanes": 1, "worker_config": prepared.config(), **prepared.ONE_PASS}
    data = prepared.ours.get_train_dataset(path, task_encoder=Images(), trust=True, **settings)
    found = prepared.ordered(prepared.ours.get_loader(data))
    assert [each["image"] is None for each in found] == [False] * 8 + [True] * 4
    assert found[:8] == theirs


@dataclass
class Joined(energon.Sample):  # type: ignore[misc]
    text: str
    image: Any = None


def test_code_of_a_dataset_runs_only_when_it_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = (
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\n"
        "sample_loader: loader.py:load\npart_filter: loader.py:wanted\n"
    )
    root = texts(tmp_path / "data", 6, yaml)
    (root / ".nv-meta/loader.py").write_text(
        "def load(sample):\n    return {'text': sample['json']['text'] * 2}\n"
        "def wanted(part):\n    return part == 'json'\n"
    )
    with pytest.raises(TypeError, match=r"the function loader\.py:load.*trust=True"):
        by_both(root, Images, monkeypatch)
    theirs, mine = by_both(root, Images, monkeypatch, trust=True)
    assert mine == theirs
    (root / ".nv-meta/dataset.yaml").write_text("__module__: os\n__class__: system\n")
    with pytest.raises(TypeError, match=r"names os\.system.*trust=True"):
        prepared.ours.get_train_dataset(
            root, task_encoder=Images(), batch_size=1, worker_config=prepared.config(), **prepared.ONE_PASS
        )


def test_parts_are_unpickled_only_when_the_dataset_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    from savable_pipeline.errors import EncodeError

    root = write(tmp_path / "data", 3, lambda i: {"pickle": pickle.dumps({"n": i})})

    class Pickles(Images):
        cookers = [energon.Cooker(energon.stateless(lambda sample: dict(sample)))]  # noqa: RUF012

    with pytest.raises(EncodeError, match="is a pickle"):
        by_both(root, Pickles, monkeypatch)
    theirs, mine = by_both(root, Pickles, monkeypatch, trust=True)
    assert mine == theirs
    assert mine[1]["pickle"] == {"n": 1}


def test_split_and_dataset_files_named_by_argument_equal_energons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = texts(tmp_path / "data", 30)
    (root / ".nv-meta/other.yaml").write_text(
        "split_parts: {train: [000001.tar, 000002.tar]}\nexclude: ['000001.tar/s013', '000002.tar/s02{1..2}']\n"
    )
    (root / ".nv-meta/other-dataset.yaml").write_text(
        "sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {text: txt}\n"
    )
    settings = {"split_config": "other.yaml", "dataset_config": "other-dataset.yaml"}
    theirs, mine = by_both(root, Images, monkeypatch, **settings)
    assert mine == theirs
    assert len(mine) == 17

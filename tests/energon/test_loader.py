"""The loader's and the dataset's own methods by Energon's names: lengths, settings, samples made again, errors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")

from savable_pipeline import energon as ours  # noqa: E402
from tests.energon.prepared import CRUDE, ONE_PASS, config, plain, text_of, texts, write  # noqa: E402
from tests.energon.test_equal_samples import ByLength, Images, Late, Writer, cook  # noqa: E402

TYPED = "sample_type: {__module__: megatron.energon, __class__: TextSample}\nfield_map: {text: txt}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("energon")
    texts(found / "typed", 55, TYPED)
    texts(found / "texts", 40)
    write(found / "more", 30, lambda i: {"json": {"text": text_of(i + 3)}, "txt": "more"}, CRUDE)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: "
    (found / "blend.yaml").write_text(head + "{blend: [{path: texts, weight: 2}, {path: more}]}}\n")
    (found / "epochs.yaml").write_text(head + "{blend_epochized: [{path: texts, repetitions: 1.5}, {path: more}]}}\n")
    excluding = "split_parts: {train: [000001.tar, 000002.tar]}\nexclude: ['000001.tar/s013', '000002.tar/s02{1..2}']\n"
    (found / "typed/.nv-meta/excluding.yaml").write_text(excluding)
    return found


class Default(energon.DefaultTaskEncoder):  # type: ignore[misc]
    cookers = [energon.Cooker(cook)]  # noqa: RUF012


class Packer(Default):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples]

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def train(library: Any, path: Path, encoder: Any, **settings: Any) -> Any:
    more = {"worker_config": config(), "batch_size": 4, "shuffle_buffer_size": None, "max_samples_per_sequence": None}
    return library.get_train_dataset(str(path), task_encoder=encoder, **{**more, **settings})


@pytest.mark.parametrize(
    ("name", "encoder", "settings"),
    [
        ("typed", Default, {}),
        ("typed", Default, {"batch_drop_last": True}),
        ("typed", Default, {"batch_size": None}),
        ("typed", Default, {"repeat": False}),
        ("typed", Default, {"virtual_epoch_length": 7}),
        ("typed", Default, {"shuffle_buffer_size": 9, "batch_size": 5}),
        ("typed", Packer, {"packing_buffer_size": 6, "batch_size": 3}),
        ("texts", ByLength, {"batch_size": None}),
        ("texts", Writer, {"repeat": False}),
        ("blend.yaml", Default, {}),
        ("epochs.yaml", Default, {"repeat": False}),
        ("epochs.yaml", Default, {}),
        ("typed", Default, {"split_config": "excluding.yaml", "batch_size": 1}),
    ],
)
def test_data_and_loaders_are_as_long_as_energons(name: str, encoder: Any, settings: Any, folder: Path) -> None:
    theirs = train(energon, folder / name, encoder(), **settings)
    mine = train(ours, folder / name, encoder(), **settings)
    assert len(mine) == len(theirs)
    assert len(ours.get_loader(mine)) == len(energon.get_loader(theirs))


@pytest.mark.parametrize(
    "settings", [{}, {"limit": 3}, {"limit": 300}, {"batch_drop_last": True}, {"batch_size": None}]
)
def test_evaluation_data_has_energons_length(settings: Any, folder: Path) -> None:
    more: dict[str, Any] = {"split_part": "train", "worker_config": config(), "batch_size": 4, **settings}
    theirs = energon.get_val_dataset(str(folder / "typed"), task_encoder=Default(), **more)
    mine = ours.get_val_dataset(folder / "typed", task_encoder=Default(), **more)
    loader = ours.get_loader(mine)
    assert len(mine) == len(loader) == len(theirs) == len(list(loader))


def test_each_dataset_of_a_mixture_is_evaluated_once(folder: Path) -> None:
    settings: dict[str, Any] = {"split_part": "train", "worker_config": config(), "batch_size": 4}
    settings["task_encoder"] = Default()
    theirs = energon.get_loader(energon.get_val_dataset(str(folder / "epochs.yaml"), **settings))
    mine = ours.get_loader(ours.get_val_dataset(folder / "epochs.yaml", **settings))
    assert len(mine) == len(theirs)
    found = [sorted(key for batch in loader for key in batch.__key__) for loader in (mine, theirs)]
    assert found[0] == found[1]
    assert len(found[0]) == 70


@pytest.mark.parametrize("lanes", [2, 6])
def test_each_rank_gets_as_many_batches_as_its_length(lanes: int, folder: Path) -> None:
    def data(world_size: int) -> Any:
        worker_config = config(0, 0, world_size)
        return train(ours, folder / "typed", Default(), worker_config=worker_config, repeat=False, lanes=lanes)

    given = len(list(ours.get_loader(data(1))))
    assert given >= 12
    assert [len(data(world_size)) for world_size in (1, 2)] == [given, given // 2]


def test_a_sample_type_is_checked_as_in_energon(folder: Path) -> None:
    for library in (energon, ours):
        data = train(library, folder / "typed", Default(), sample_type=energon.TextSample)
        assert len(data) == 14
        with pytest.raises(AssertionError, match="is not a subclass of"):
            train(library, folder / "typed", Default(), sample_type=energon.VQASample)


def test_data_that_energon_built_is_rejected(folder: Path) -> None:
    theirs = train(energon, folder / "typed", Default())
    for function in (
        ours.get_loader,
        ours.get_savable_loader,
        ours.RepeatDataset,
        lambda data: ours.LimitDataset(data, 3),
    ):
        with pytest.raises(TypeError, match=r"Dataset is no dataset of savable_pipeline\.energon.*get_train_dataset"):
            function(theirs)


def test_configuration_of_a_loader_distinguishes_runs(folder: Path) -> None:
    def configured(**settings: Any) -> Any:
        return ours.get_savable_loader(train(ours, folder / "blend.yaml", Default(), **settings)).config()

    found = configured()
    assert found == configured()
    assert found["dataset"]["batch_size"] == 4
    assert list(found["dataset"]["datasets"]) == ["texts", "more"]
    assert found["dataset"]["datasets"]["texts"]["type"] == "CrudeWebdataset"
    theirs = energon.get_savable_loader(train(energon, folder / "blend.yaml", Default())).config()
    assert set(found) == set(theirs)
    for settings in (
        {"batch_size": 5},
        {"shuffle_buffer_size": 3},
        {"seed": 4},
        {"lanes": 6},
        {"packing_buffer_size": 2},
    ):
        encoder = Packer() if "packing_buffer_size" in settings else Default()
        loader = ours.get_savable_loader(train(ours, folder / "blend.yaml", encoder, **settings))
        assert loader.config() != found


class Dataclasses(Late):
    """Batches of a class of Energon's, made with random numbers."""

    @energon.stateless(restore_seeds=True)
    def batch(self, samples: list[Any]) -> Any:
        batch = super().batch(samples)
        batch.noise = [random.random(), torch.rand(3), self.current_batch_index]
        return batch


class Noisy(Writer):
    @energon.stateless(restore_seeds=True)
    def encode_batch(self, batch: Any) -> Any:
        return {"__restore_key__": batch.__restore_key__, "__key__": batch.__key__, "noise": random.random()}


@pytest.mark.parametrize(
    ("name", "encoder", "settings"),
    [
        ("blend.yaml", Dataclasses, {"packing_buffer_size": 5, "batch_size": 2}),
        ("blend.yaml", Dataclasses, {"batch_size": 3, "shuffle_buffer_size": 9}),
        ("texts", Noisy, {"batch_size": 3}),
        ("typed", Images, {"batch_size": None}),
    ],
)
def test_batch_is_rebuilt_from_its_key(name: str, encoder: Any, settings: Any, folder: Path) -> None:
    make = lambda: ours.get_savable_loader(train(ours, folder / name, encoder(), lanes=4, seed=3, **settings))  # noqa: E731
    loader, again = make(), make()
    assert again.can_restore_sample()
    batches = [next(loader) for _ in range(24)]
    random.seed(1), torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()
    keys = [batch["__restore_key__"] if isinstance(batch, dict) else batch.__restore_key__ for batch in batches]
    assert len(set(keys)) == 24
    for batch, key in zip(batches, keys, strict=True):
        made = again.restore_sample(key)
        assert plain(made) == plain(batch)
        assert (made["__restore_key__"] if isinstance(made, dict) else made.__restore_key__) == key
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    with pytest.raises(ValueError, match="no __restore_key__ of this dataset"):
        again.restore_sample(("BatchDataset", 3, ("Webdataset", 4)))


class Failing(Packer):
    """Raises in every method, by the sample's key."""

    @energon.stateless
    def encode_sample(self, sample: Any) -> Any:
        if sample.__key__.endswith("2"):
            raise ValueError("encode")
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        if any(sample.__key__ == "s017" for sample in samples):
            raise ValueError("select")
        return [samples[:2], samples[2:]]

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        if any(sample.__key__ == "s005" for sample in samples):
            raise ValueError("pack")
        return samples[0]

    @energon.stateless
    def batch(self, samples: list[Any]) -> Any:
        if any(sample.__key__.endswith("8") for sample in samples):
            raise ValueError("batch")
        return [sample.__key__ for sample in samples]

    @energon.stateless
    def encode_batch(self, batch: Any) -> Any:
        if "s000" in batch:
            raise ValueError("encode_batch")
        return batch


class Generating(Default):
    @energon.stateless
    def encode_sample(self, sample: Any) -> Any:
        yield sample
        if sample.__key__.endswith("2"):
            raise ValueError("generated")


@energon.stateless
def uncooked(sample: dict[str, Any]) -> Any:
    if sample["__key__"].endswith("3"):
        raise ValueError("cook")
    return cook(sample)


class Uncooked(Default):
    cookers = [energon.Cooker(uncooked)]  # noqa: RUF012


def keys_of(subject: Any) -> Any:
    if isinstance(subject, list):
        return [keys_of(each) for each in subject]
    return subject["__key__"] if isinstance(subject, dict) else getattr(subject, "__key__", subject)


@pytest.mark.parametrize(("encoder", "packing"), [(Failing, 5), (Generating, None), (Uncooked, None)])
def test_error_handler_gets_energons_arguments(encoder: Any, packing: int | None, folder: Path) -> None:
    def handled(library: Any) -> list[Any]:
        found = []

        def handler(error: Exception, subject: Any, sources: Any) -> None:
            files = None if sources is None else [(str(each.dataset_path), *each.file_names) for each in sources]
            found.append([str(error), keys_of(subject), files])

        settings = {**ONE_PASS, "shuffle_over_epochs_multiplier": None, "parallel_shard_iters": 1, "batch_size": 2}
        worker_config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=handler)
        if library is ours:
            settings["lanes"] = 1
        data = train(
            library,
            folder / "texts",
            encoder(),
            worker_config=worker_config,
            packing_buffer_size=packing,
            **settings,
        )
        list(library.get_loader(data))
        return found

    mine, theirs = handled(ours), handled(energon)
    assert sorted(mine, key=repr) == sorted(theirs, key=repr)
    assert len({error for error, *_ in mine}) == (5 if encoder is Failing else 1)


def test_error_of_a_handler_ends_the_run(folder: Path) -> None:
    worker_config = energon.WorkerConfig(
        rank=0, world_size=1, num_workers=0, global_error_handler=energon.errors.reraise_exception
    )
    data = train(ours, folder / "texts", Generating(), worker_config=worker_config, lanes=1)
    with pytest.raises(ValueError, match="generated"):
        list(ours.get_loader(data))

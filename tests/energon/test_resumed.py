"""A run of an Energon encoder that is stopped, killed and resumed gives the batches of one that never was."""

from __future__ import annotations

import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")

from savable_pipeline import energon as ours  # noqa: E402
from tests.energon import prepared  # noqa: E402
from tests.energon.chains import LANES, by_slots, check_chain  # noqa: E402
from tests.energon.prepared import config, texts, write  # noqa: E402
from tests.energon.test_equal_samples import Images, Late, Writer, cook  # noqa: E402


class Random(Writer):
    """A packer that sorts, shuffles and drops; nothing is skipped too often for small lanes."""

    @energon.stateless(restore_seeds=True)
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        samples.sort(key=lambda sample: (len(sample.tokens), sample.__key__))
        groups = [samples[i : i + 3] for i in range(0, len(samples) - 1, 3)]
        random.shuffle(groups)
        return groups

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        tokens = torch.cat([sample.tokens for sample in samples])
        return samples[0].derive_from(samples[0], tokens=tokens, noise=sum(sample.noise for sample in samples))


class Grouped(Late):
    """Batches of one length alone, whose size the group says."""

    @energon.stateless(restore_seeds=True)
    def preencode_sample(self, sample: Any) -> Any:
        if random.random() < 0.1:
            raise energon.SkipSample
        return super().preencode_sample.__wrapped__(self, sample)

    def batch_group_criterion(self, sample: Any) -> tuple[Any, int]:
        if len(sample.tokens) % 7 == 0:
            raise energon.SkipSample
        wide = len(sample.tokens) > 20
        return ("wide", 0.5) if wide else ("narrow", 1), 2 if wide else 3


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("energon")
    texts(folder / "texts", 60)
    write(folder / "more", 30, lambda i: {"json": {"text": prepared.text_of(i + 3)}, "txt": "more"})
    yaml = "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\n"
    yaml += "field_map: {image: png, caption: txt}\n"
    write(folder / "images", 24, lambda i: {"png": prepared.png(i), "txt": str(i)}, yaml)
    head = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: "
    blend = "{blend: [{path: texts, weight: 2, subflavors: {a: 1}, shuffle_over_epochs_multiplier: 2}, %s]}}\n"
    (folder / "blend.yaml").write_text(head + blend % "{path: more}")
    (folder / "nested.yaml").write_text(head + blend % "{path: first.yaml, split_part: val}")
    (folder / "epochs.yaml").write_text(
        head + "{blend_epochized: [{path: texts, repetitions: 0.5}, {path: more, repetitions: 2}]}}\n"
    )
    (folder / "first.yaml").write_text("splits: {val: {datasets: [{path: more, subflavor: old, split_part: train}]}}\n")
    return folder


CASES = {
    "packed": ("texts", Random, {"packing_buffer_size": 9, "batch_size": 2, "shuffle_buffer_size": 10}),
    "late": ("blend.yaml", Late, {"packing_buffer_size": 4, "batch_size": 3}),
    "groups": ("texts", Grouped, {"batch_size": None, "shuffle_buffer_size": 5}),
    "epochs": ("epochs.yaml", Writer, {"batch_size": 3}),
    "nested": ("nested.yaml", Writer, {"batch_size": 2, "shuffle_buffer_size": 20}),
    "images": ("images", Images, {"batch_size": None, "shuffle_buffer_size": 4, "image_decode": "pil"}),
}


def dataset(roots: Path, case: str, worker_config: Any, **more: Any) -> Any:
    path, make, settings = CASES[case]
    settings = {"shuffle_buffer_size": None, "max_samples_per_sequence": 4, "lanes": LANES, "seed": 5, **settings}
    return ours.get_train_dataset(roots / path, task_encoder=make(), worker_config=worker_config, **settings, **more)


@pytest.mark.parametrize("case", CASES)
def test_chains_of_resumes_with_other_ranks_are_exact(case: str, roots: Path) -> None:
    make = partial(dataset, roots, case)
    expected = by_slots(make, 24)
    assert len(set(expected)) >= 12
    resumes, _ = check_chain(make, expected, 1)
    assert resumes >= 3


def test_chains_of_resumes_with_killed_workers_are_exact(roots: Path) -> None:
    make = partial(dataset, roots, "packed")
    resumes, kills = check_chain(make, by_slots(make, 24), 4, most_workers=1)
    assert resumes and kills


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_two_hundred_chains_with_killed_workers_are_exact(case: str, roots: Path) -> None:
    make = partial(dataset, roots, case)
    expected = by_slots(make, 60)
    done = [check_chain(make, expected, seed, most_workers=3) for seed in range(34)]
    print(f"{case}: {sum(resumes for resumes, _ in done)} resumes, {sum(kills for _, kills in done)} kills")


def test_virtual_epochs_have_a_length_and_resume(roots: Path) -> None:
    make = partial(dataset, roots, "packed", virtual_epoch_length=5)
    loader, again = ours.get_savable_loader(make(config())), ours.get_savable_loader(make(config()))
    assert len(loader) == len(make(config())) == 5
    epochs = [[batch["noise"] for batch in loader] for _ in range(3)]
    assert [len(epoch) for epoch in epochs] == [5, 5, 5]
    assert loader.epoch == 2
    first = iter(again)
    for _ in range(7 - 5):
        next(first)
    other = ours.get_savable_loader(make(config(1)))
    other.restore_state_rank(again.save_state_rank())
    assert [[batch["noise"] for batch in other] for _ in range(2)] == [epochs[0][2:], epochs[1]]
    other.close()


def test_states_are_saved_by_energons_method_names(roots: Path) -> None:
    make = partial(dataset, roots, "epochs")
    loader = ours.get_savable_loader(make(config()))
    loader.restore_state_rank(None)
    next(loader)
    state = loader.save_state_rank()
    assert loader.save_state_global(global_dst_rank=1) is None
    assert loader.save_state_global(global_dst_rank=0) == state == loader.state_dict()
    expected = next(loader)
    for restore in ("restore_state_rank", "restore_state_global", "load_state_dict"):
        other = ours.get_loader(make(config()))
        getattr(other, restore)(state)
        assert prepared.plain(next(other)) == prepared.plain(expected)


def test_evaluation_restarts_and_each_dataset_is_separate(roots: Path) -> None:
    settings: dict[str, Any] = {
        "worker_config": config(),
        "batch_size": 4,
        "task_encoder": Late(),
        "split_part": "train",
    }
    every = ours.get_loader(ours.get_val_dataset(roots / "blend.yaml", **settings))
    keys = [[key for batch in every for key in batch.__key__] for _ in range(2)]
    assert keys[0] == keys[1]
    assert len(keys[0]) == 60 + 30 - 9
    alone = ours.get_val_datasets(roots / "blend.yaml", **settings)
    assert [len([key for batch in ours.get_loader(data) for key in batch.__key__]) for data, _ in alone] == [54, 27]
    assert [str(source.path) for _, source in alone] == [str(roots / name) for name in ("texts", "more")]
    limited = ours.LimitDataset(ours.RepeatDataset(alone[1][0]), 12, reset_after_epoch=True)
    loader = ours.get_loader(limited)
    twice = [[prepared.plain(batch) for batch in loader] for _ in range(2)]
    assert twice[0] == twice[1]
    assert len(twice[0]) == len(loader) == 12


def test_users_pipeline_can_be_sent_to_a_spawned_process(roots: Path) -> None:
    pipeline = dataset(roots, "packed", config()).pipeline
    import savable_pipeline as sp

    expected = next(pipeline(sp.Lane(seed=5)))
    copied = pickle.loads(pickle.dumps(pipeline))
    assert prepared.plain(next(copied(sp.Lane(seed=5)))) == prepared.plain(expected)


def test_sample_index_is_keyed_and_batch_index_counts(roots: Path) -> None:
    class Indexed(energon.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = [energon.Cooker(cook)]  # noqa: RUF012

        @energon.stateless
        def encode_sample(self, sample: Any) -> Any:
            return {"key": sample.__key__, "index": self.current_sample_index}

        @energon.stateless
        def batch(self, samples: list[Any]) -> Any:
            return samples, self.current_batch_index

    def first(lanes: int) -> Any:
        settings: dict[str, Any] = {"shuffle_buffer_size": None, "max_samples_per_sequence": 1, "lanes": lanes}
        data = ours.get_train_dataset(
            roots / "texts", worker_config=config(), batch_size=5, task_encoder=Indexed(), repeat=False, **settings
        )
        return list(ours.get_loader(data))

    batches = first(1)
    assert [number for _, number in batches] == list(range(12))
    indices = {each["key"]: each["index"] for samples, _ in batches for each in samples}
    assert len(set(indices.values())) == 60
    assert {each["key"]: each["index"] for samples, _ in first(2) for each in samples}.items() <= indices.items()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.long)])
def test_run_of_energon_continues_at_the_same_fraction_of_an_epoch(workers: int, roots: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 4, "shuffle_buffer_size": 6, "max_samples_per_sequence": 4}
    data = energon.get_train_dataset(
        str(roots / "texts"), worker_config=config(workers), task_encoder=Late(), **settings
    )
    theirs = energon.get_savable_loader(data, checkpoint_every_sec=0, checkpoint_every_min_n_samples=1)
    batches = iter(theirs)
    used = sum(len(next(batches).__key__) for _ in range(6))
    state = theirs.save_state_rank()
    skipped = 60 * 0.1 / 2  # SkipSample: drawn and in no batch
    mine = ours.get_train_dataset(roots / "texts", worker_config=config(), task_encoder=Late(), lanes=2, **settings)
    begun = ours.begin_at_share(mine, [state])
    assert used <= begun.skip_samples <= used + skipped + 4
    share = begun.skip_samples / 60
    assert begun.again == round(60 * share * (1 - share))
    loader = ours.get_savable_loader(begun.dataset)
    first = [key for _ in range(4) for key in next(loader).__key__]
    assert len(set(first)) == 16
    again = ours.get_savable_loader(
        ours.get_train_dataset(
            roots / "texts",
            worker_config=config(),
            task_encoder=Late(),
            lanes=2,
            skip_samples=begun.skip_samples,
            **settings,
        )
    )
    again.restore_state_rank(loader.save_state_rank())
    for _ in range(12):
        assert prepared.plain(next(again)) == prepared.plain(next(loader))

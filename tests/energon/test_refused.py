"""What cannot be resumed exactly is a TypeError when the dataset is made, which says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

energon = pytest.importorskip("megatron.energon", reason="needs megatron-energon: pip install -e '.[energon]'")

from savable_pipeline import energon as ours  # noqa: E402
from savable_pipeline.errors import CheckpointMismatchError, EncodeError  # noqa: E402
from tests.energon.prepared import ONE_PASS, config, texts  # noqa: E402


class Plain(energon.DefaultTaskEncoder):  # type: ignore[misc]
    cookers = [energon.Cooker(energon.stateless(lambda sample: dict(sample)))]  # noqa: RUF012


class Building(Plain):
    def build_batch(self, *args: Any, **settings: Any) -> Any:
        return super().build_batch(*args, **settings)


class Remembering(Plain):
    def encode_sample(self, sample: Any) -> Any:
        self.last = sample
        return sample


class ManyBatches(Plain):
    @energon.stateless
    def encode_batch(self, batch: Any) -> Any:
        yield batch


class ManyPacks(Plain):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples]

    @energon.stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        yield samples[0]


class ByBatch(Plain):
    @energon.stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return {**sample, "batch": self.current_batch_index}


class Both(Plain):
    @energon.stateless
    def encode_sample(self, sample: Any) -> Any:
        return sample

    @energon.stateless
    def preencode_sample(self, sample: Any) -> Any:
        return sample


class Uncooked(Plain):
    cookers = ()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("energon") / "data", 12)


def train(root: Path, encoder: Any, **settings: Any) -> Any:
    settings = {"worker_config": config(), "batch_size": 2, **ONE_PASS, **settings}
    return ours.get_train_dataset(root, task_encoder=encoder, **settings)


@pytest.mark.parametrize(
    ("encoder", "packing", "cure"),
    [
        (Building, None, "Delete it, and write it as a stage"),
        (Remembering, None, "is not @stateless and writes to self. Keep no state"),
        (ManyBatches, None, "encode_batch must not be a generator. Yield from encode_sample"),
        (ManyPacks, 4, "pack_selected_samples must not be a generator. Yield from encode_sample"),
        (Plain, 4, "packing needs select_samples_to_pack and pack_selected_samples of Plain"),
        (ByBatch, None, "encode_sample uses current_batch_index.*Use it in `batch`"),
        (Both, None, "Write only one of them"),
        (Uncooked, None, "has no cookers"),
    ],
)
def test_unsupported_encoders_are_rejected(encoder: Any, packing: int | None, cure: str, root: Path) -> None:
    with pytest.raises(TypeError, match=cure):
        train(root, encoder(), packing_buffer_size=packing)


def test_hidden_use_of_a_batch_index_is_an_error(root: Path) -> None:
    class Hidden(Plain):
        @energon.stateless(restore_seeds=True)
        def encode_sample(self, sample: Any) -> Any:
            return {**sample, "batch": getattr(self, "current_" + "batch_index")}

    loader = ours.get_loader(train(root, Hidden(), lanes=1))
    with pytest.raises(EncodeError, match="current_batch_index is not known yet"):
        next(loader)


def test_unknown_and_unused_arguments_are_rejected(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match="unknown argument 'colour'"):
        train(root, Plain(), colour="red")
    with caplog.at_level("INFO"):
        data = train(root, Plain(), parallel_shard_iters=4, shuffle_over_epochs_multiplier=3)
        ours.get_savable_loader(data, checkpoint_every_sec=3.0)
    said = [record.getMessage() for record in caplog.records if "energon" in record.name]
    assert [message.split(" is ")[0] for message in said] == [
        "parallel_shard_iters",
        "shuffle_over_epochs_multiplier=3",
        "checkpoint_every_sec",
    ]
    with pytest.raises(TypeError, match="unknown argument 'colour' of get_savable_loader"):
        ours.get_savable_loader(data, colour="red")


def test_ranks_that_do_not_divide_the_lanes_are_an_error_that_names_lanes(root: Path) -> None:
    data = train(root, Plain(), worker_config=config(rank=3, world_size=64), repeat=True)
    with pytest.raises(ValueError, match=r"64 ranks do not divide 96 lanes.*lanes=128"):
        ours.get_savable_loader(data)


def test_state_of_energon_is_rejected_with_a_fix(root: Path) -> None:
    theirs = energon.get_savable_loader(
        energon.get_train_dataset(str(root), task_encoder=Plain(), worker_config=config(), batch_size=2, **ONE_PASS)
    )
    next(iter(theirs))
    loader = ours.get_savable_loader(train(root, Plain(), repeat=True, lanes=2))
    with pytest.raises(CheckpointMismatchError, match="begin_at_share"):
        loader.restore_state_rank(theirs.save_state_rank())


def test_without_the_extra_the_first_name_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['megatron'] = None\n"
        "import savable_pipeline.energon as energon\n"
        "try: energon.get_train_dataset\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "needs Megatron-Energon. Run pip install megatron-energon" in done.stdout

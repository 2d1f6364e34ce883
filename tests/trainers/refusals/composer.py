"""What Composer's trainer is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Timestamp
from composer.models import ComposerModel
from composer.utils.parallelism import TPConfig
from torch.distributed.device_mesh import init_device_mesh

import savable_pipeline as sp
from savable_pipeline.errors import StateError
from savable_pipeline.trainers.composer import SavableData, eval_data
from tests.support.toy_mesh import two_fake_ranks


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        return self.layer(batch["x"]).square().mean()

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs


def trainer(data: Any, callbacks: list[Any], **settings: Any) -> Trainer:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quiet = {"device": "cpu", "precision": "fp32", "progress_bar": False, "max_duration": "4ba", **settings}
    return Trainer(model=model, optimizers=optimizer, train_dataloader=data.spec, callbacks=callbacks, **quiet)


@pytest.mark.parametrize("name", [SavableData, eval_data])
def test_example_matches_its_comment(runs: Any, name: Any) -> None:
    assert runs(name) == [1]


def test_loader_without_the_callback_is_rejected_at_the_first_batch(make: Any) -> None:
    with pytest.raises(sp.SavableError, match=r"no callback of the trainer"):
        trainer(SavableData(make("endless"), batch_size=4), []).fit()


def test_a_checkpoint_without_the_data_is_rejected(make: Any, tmp_path: Path) -> None:
    data = SavableData(make("endless"), batch_size=4)
    made = trainer(data, [data], max_duration="2ba")
    made.fit()
    saved = made.save_checkpoint(str(tmp_path / "saved.pt"))
    ignored = {"load_path": saved, "load_ignore_keys": ["state/callbacks"]}
    data = SavableData(make("endless"), batch_size=4)
    with pytest.raises(StateError, match="no state of the data"):
        trainer(data, [data], **ignored).fit()


def test_trainer_that_skips_batches_itself_is_detected(make: Any, tmp_path: Path) -> None:
    class Spun(SavableData):
        def fit_start(self, state: Any, logger: Any) -> None:
            super().fit_start(state, logger)
            state.dataset_resumption.clear()

    for load, duration in ((None, "2ba"), (str(tmp_path / "saved.pt"), "4ba")):
        data = Spun(make("endless"), batch_size=4)
        made = trainer(data, [data], max_duration=duration, load_path=load)
        if load is None:
            made.fit()
            made.save_checkpoint(str(tmp_path / "saved.pt"))
    with pytest.raises(sp.SavableError, match="Turn off its own skipping"):
        made.fit()


def test_callback_with_the_state_of_one_rank_is_rejected_on_save(make: Any, tmp_path: Path) -> None:
    bare = make("endless", ranks=(0, 2))

    class Own(Callback):
        def state_dict(self) -> dict[str, Any]:
            return bare.state_dict()

    data = SavableData(make("endless"), batch_size=4)
    made = trainer(data, [data, Own()])
    with pytest.raises(sp.SavableError, match=r"Composer saves the state of rank 0 only.*SavableData"):
        made.save_checkpoint(str(tmp_path / "saved.pt"))


def test_tensor_parallel_processes_need_shared_batches(make: Any) -> None:
    """In one process, as one of the two of Composer's configuration."""
    with two_fake_ranks():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        state: Any = SimpleNamespace(tp_config=TPConfig(device_mesh=mesh), timestamp=Timestamp(), dataset_resumption={})
        with pytest.raises(ValueError, match=r"processes of tp need the same batches\. Pass ranks=sp\.Ranks\.of"):
            SavableData(make(ranks=(0, 2)), batch_size=4).fit_start(state, None)  # type: ignore[arg-type]
        SavableData(make(ranks=(0, 1)), batch_size=4).fit_start(state, None)  # type: ignore[arg-type]


def test_evaluation_must_start_at_the_start(make: Any) -> None:
    with pytest.raises(ValueError, match='on_iter="restart"'):
        eval_data(make(tail="pad"), batch_size=4)
